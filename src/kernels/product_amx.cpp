// Products of BF16 with AMX's tiles.
//
// The right operand is copied into panels of 32 columns, tile by tile, as many at a time as stay in the
// second-level cache; the left one is read where it lies, or copied likewise where it lies across, has ragged
// ends, or is used so often that the copy pays. A block of the result is two tiles by two, whose sums stay in
// tiles; where a sum is long it is put aside in FP32 in between.
#include "kernels/amx_tiles.h"
#include "kernels/attention_vectors_avx512.h"
#include "kernels/product.h"
#include "kernels/tile_operands_avx512.h"

namespace halfstep {
namespace {

using Floats = Avx512::Floats;

constexpr std::size_t kBlock = kProductBlock, kTile = 512, kStep = 2 * kTile;  // codes of a tile, and of two
/// Of the left operand, used with all panels that are there: 512 KiB with the longest sums.
constexpr std::size_t kRowsTogether = 256;
/// With sums put aside. So many rows share the panels.
constexpr std::size_t kMostRows = 4096;
/// Of panels: 2 MiB.
constexpr std::size_t kPanelCodes = std::size_t{1} << 20;
/// Before a sum is put aside.
constexpr std::size_t kMostTerms = 2048;
/// Columns of a part, and terms, with which a copy of the left operand pays, whose tiles then come from
/// memory in a row.
constexpr std::size_t kColumnsThatPay = 768, kTermsThatPay = 1024;
/// Results above are written past the caches, which they would clear.
constexpr std::size_t kResultBytes = std::size_t{1} << 20;

/// How a part is gone through, from sizes alone.
struct Plan {
  std::size_t terms;    // at a time, a multiple of kBlock
  std::size_t columns;  // at a time, likewise
  std::size_t rows;     // that share sums put aside
  bool puts_aside;      // there are more terms than `terms`
  bool copies_left;

  Plan(const ProductCall& call, const ProductPart& part) {
    const std::size_t pieces = call.terms / kMostTerms + (call.terms % kMostTerms > kMostTerms / 2 ? 1 : 0);
    puts_aside = pieces > 1;
    terms = up(puts_aside ? (call.terms + pieces - 1) / pieces : call.terms);
    columns = kPanelCodes / terms / kBlock * kBlock;
    if (columns < kBlock) columns = kBlock;
    columns = least(columns, up(part.columns));
    rows = puts_aside ? least(kMostRows, part.rows) : part.rows;
    copies_left = call.left.is_transposed || call.terms % kBlock != 0 ||
                  (part.columns >= kColumnsThatPay && terms <= kTermsThatPay);
  }

  static std::size_t up(std::size_t count) { return (count + kBlock - 1) / kBlock * kBlock; }
  static std::size_t least(std::size_t a, std::size_t b) { return a < b ? a : b; }
};

struct Memory {
  Code *panels, *left;
  float* sums;
  Code* waiting;  // results of kRowsTogether rows and a block's columns
  std::size_t bytes;

  Memory(const Plan& plan, void* memory) {
    Pieces pieces{static_cast<char*>(memory)};
    panels = pieces.take<Code>(plan.columns * plan.terms);
    left = pieces.take<Code>(kRowsTogether * plan.terms);  // ragged rows are copied in any case
    sums = pieces.take<float>(plan.puts_aside ? Plan::up(plan.rows) * plan.columns : kBlock * kBlock);
    waiting = pieces.take<Code>(kRowsTogether * kBlock);
    bytes = pieces.taken;
  }
};

/// to[block][step][two tiles of 16 rows][32 terms], of `count` rows, each with its terms side by side.
void copy_rows(const Source& from, std::size_t first, std::size_t count, std::size_t first_term,
               std::size_t terms, Code* to) {
  for (std::size_t row = 0; row < Plan::up(count); ++row) {
    Code* line = to + row / kBlock * kBlock * terms + row % kBlock * kBlock;
    const Code* const ahead = from.codes + static_cast<std::ptrdiff_t>(first + row + 2) * from.row;
    for (std::size_t term = first_term; term < first_term + terms; term += kBlock, line += kStep) {
      _mm_prefetch(ahead + term, _MM_HINT_T0);
      _mm512_store_si512(line, from.load(first + row, term));
    }
  }
}

/// Right tiles, [16 pairs of terms][16 columns], from columns whose terms lie side by side.
void copy_across(const Source& from, std::size_t first, std::size_t term, Code* to) {
  from.of_block(first, term, [&](auto load) {
    for (std::size_t half = 0; half < 2; ++half) {
      __m512i rows[16];
      for (std::size_t i = 0; i < 16; ++i) rows[i] = load(half * 16 + i);
      Avx512::transpose(rows);
      for (std::size_t i = 0; i < 16; ++i) _mm512_store_si512(to + half * kTile + i * kBlock, rows[i]);
    }
  });
}

/// Right tiles from terms whose columns lie side by side.
void copy_pairs(const Source& from, std::size_t first, std::size_t term, Code* to) {
  from.of_block(term, first, [&](auto load) {
    for (std::size_t i = 0; i < 16; ++i) {
      const __m512i even = load(2 * i), odd = load(2 * i + 1);
      _mm512_store_si512(to + i * kBlock, low_pairs(even, odd));
      _mm512_store_si512(to + kTile + i * kBlock, high_pairs(even, odd));
    }
  });
}

/// Left tiles, [16 rows][32 terms], from terms whose rows lie side by side.
void copy_transposed(const Source& from, std::size_t first, std::size_t term, Code* to) {
  from.of_block(term, first, [&](auto load) {
    __m512i low[16], high[16];
    turn_block(load, low, high);
    for (std::size_t i = 0; i < 16; ++i) {
      _mm512_store_si512(to + i * kBlock, low[i]);
      _mm512_store_si512(to + kTile + i * kBlock, high[i]);
    }
  });
}

/// to[block][step][two tiles], of `count` rows or columns. Where a term's codes lie side by side, eight
/// blocks go on together: of a line of memory that is far from the next one all is used while it is near.
template <auto copy_step, bool terms_lie_across>
void copy_blocks(const Source& from, std::size_t first, std::size_t count, std::size_t first_term,
                 std::size_t terms, Code* to) {
  constexpr std::size_t kTogether = (terms_lie_across ? 8 : 1) * kBlock, kTermsAhead = 64;
  for (std::size_t group = 0; group < count; group += kTogether) {
    const std::size_t end = Plan::least(count, group + kTogether);
    for (std::size_t term = first_term; term < first_term + terms; term += kBlock)
      for (std::size_t block = group; block < end; block += kBlock) {
        if constexpr (terms_lie_across)
          for (std::size_t i = kTermsAhead; i < kTermsAhead + kBlock; ++i)
            _mm_prefetch(from.codes + static_cast<std::ptrdiff_t>(term + i) * from.row + first + block,
                         _MM_HINT_T1);
        copy_step(from, first + block, term, to + block * terms + (term - first_term) * kBlock);
      }
  }
}

/// Tiles of 32 rows: the second 16 are `next` codes behind the first, the next terms `step` behind.
struct LeftTiles {
  const Code* codes;
  std::size_t row_bytes, next, step;
};

/// What will be read soon: two rows that are brought into the second-level cache meanwhile.
struct Ahead {
  const Code* codes = nullptr;
  std::size_t row = 0;
};

/// sums[32][32] = left * panel, or added to what is there.
void add_block(const LeftTiles& left, const Code* panel, std::size_t steps, float* sums, std::size_t sums_row,
               bool adds, const Ahead& ahead) {
  const std::size_t bytes = sums_row * sizeof(float);
  float* const below = sums + 16 * sums_row;
  if (adds) {
    Tiles::load<0>(sums, bytes);
    Tiles::load<1>(sums + 16, bytes);
    Tiles::load<2>(below, bytes);
    Tiles::load<3>(below + 16, bytes);
  } else {
    Tiles::zero<0>();
    Tiles::zero<1>();
    Tiles::zero<2>();
    Tiles::zero<3>();
  }
  const Code* a = left.codes;
  for (std::size_t step = 0; step < steps; ++step, a += left.step, panel += kStep) {
    Tiles::load<6>(panel, 64);
    Tiles::load_once<4>(a, left.row_bytes);
    Tiles::load<7>(panel + kTile, 64);
    Tiles::multiply<0, 4, 6>();
    Tiles::multiply<1, 4, 7>();
    Tiles::load_once<5>(a + left.next, left.row_bytes);
    if (ahead.codes) {
      _mm_prefetch(ahead.codes + step * kBlock, _MM_HINT_T1);
      _mm_prefetch(ahead.codes + ahead.row + step * kBlock, _MM_HINT_T1);
    }
    Tiles::multiply<2, 5, 6>();
    Tiles::multiply<3, 5, 7>();
  }
  Tiles::store<0>(sums, bytes);
  Tiles::store<1>(sums + 16, bytes);
  Tiles::store<2>(below, bytes);
  Tiles::store<3>(below + 16, bytes);
}

class Multiplication {
 public:
  Multiplication(const ProductCall& call, const ProductPart& part, const Plan& plan, const Memory& memory)
      : call_(call),
        part_(part),
        plan_(plan),
        memory_(memory),
        left_{.codes = call.left.codes,
              .row = static_cast<std::ptrdiff_t>(call.left.row),
              .size = call.left.is_transposed ? call.rows : call.terms,
              .count = call.left.is_transposed ? call.terms : call.rows},
        right_{.codes = call.right.codes,
               .row = static_cast<std::ptrdiff_t>(call.right.row),
               .size = call.right.is_transposed ? call.terms : call.columns,
               .count = call.right.is_transposed ? call.columns : call.terms} {
    const bool is_large = call.rows * call.columns * sizeof(Code) > kResultBytes;
    past_caches_ =
        is_large && reinterpret_cast<std::uintptr_t>(call.result) % 64 == 0 && call.result_row % kBlock == 0;
  }

  void run() const {
    const std::size_t end_row = part_.first_row + part_.rows, end_column = part_.first_column + part_.columns;
    for (std::size_t column = part_.first_column; column < end_column; column += plan_.columns)
      for (std::size_t row = part_.first_row; row < end_row; row += plan_.rows)
        for (std::size_t term = 0; term < call_.terms; term += plan_.terms)
          run_panels({row, Plan::least(plan_.rows, end_row - row), column,
                      Plan::least(plan_.columns, end_column - column)},
                     term);
    if (past_caches_) _mm_sfence();
  }

 private:
  void run_panels(const ProductPart& here, std::size_t first_term) const {
    const std::size_t terms = Plan::least(plan_.terms, Plan::up(call_.terms - first_term));
    const auto copy =
        call_.right.is_transposed ? copy_blocks<copy_across, false> : copy_blocks<copy_pairs, true>;
    copy(right_, here.first_column, here.columns, first_term, terms, memory_.panels);
    const std::size_t end = here.first_row + here.rows;
    for (std::size_t row = here.first_row; row < end; row += kRowsTogether)
      run_rows({row, Plan::least(kRowsTogether, end - row), here.first_column, here.columns},
               memory_.sums + (plan_.puts_aside ? (row - here.first_row) * plan_.columns : 0), first_term,
               terms);
  }

  /// `sums` are used where sums are put aside.
  void run_rows(const ProductPart& here, float* sums, std::size_t first_term, std::size_t terms) const {
    const bool copies = plan_.copies_left || here.rows % kBlock != 0;
    const auto copy = call_.left.is_transposed ? copy_blocks<copy_transposed, true> : copy_rows;
    if (copies) copy(left_, here.first_row, here.rows, first_term, terms, memory_.left);
    const Code* const in_place = call_.left.codes + here.first_row * call_.left.row + first_term;
    const bool is_last = first_term + terms >= call_.terms;
    // What follows these rows is read meanwhile, two rows with each block.
    const std::size_t rows_ahead =
        copies || here.first_row + 2 * kRowsTogether > part_.first_row + part_.rows ? 0 : kRowsTogether;
    std::size_t ahead_row = 0;
    for (std::size_t column = 0; column < here.columns; column += kBlock)
      for (std::size_t row = 0; row < here.rows; row += kBlock) {
        const LeftTiles tiles = copies
                                    ? LeftTiles{memory_.left + row * terms, 64, kTile, kStep}
                                    : LeftTiles{in_place + row * call_.left.row,
                                                call_.left.row * sizeof(Code), 16 * call_.left.row, kBlock};
        Ahead ahead;
        if (ahead_row < rows_ahead) {
          ahead = {in_place + (kRowsTogether + ahead_row) * call_.left.row, call_.left.row};
          ahead_row += 2;
        }
        float* const block = plan_.puts_aside ? sums + row * plan_.columns + column : memory_.sums;
        const std::size_t sums_row = plan_.puts_aside ? plan_.columns : kBlock;
        add_block(tiles, memory_.panels + column * terms, terms / kBlock, block, sums_row, first_term > 0,
                  ahead);
        if (is_last) write(block, sums_row, here, row, column);
      }
  }

  /// Past the caches two blocks of columns go together, 128 bytes of a row: the first waits for the second.
  void write(const float* sums, std::size_t sums_row, const ProductPart& here, std::size_t row,
             std::size_t column) const {
    const std::size_t rows = Plan::least(kBlock, here.rows - row),
                      columns = Plan::least(kBlock, here.columns - column);
    const bool is_first_of_two = column / kBlock % 2 == 0, whole = columns == kBlock;
    const bool waits = is_first_of_two && column + 2 * kBlock <= here.columns;
    Floats bias[2] = {};
    if (call_.bias)
      for (std::size_t half = 0; half < 2; ++half)
        bias[half] = Avx512::load_codes(Format::BF16, call_.bias + here.first_column + column + half * 16,
                                        columns > half * 16 ? Plan::least(16, columns - half * 16) : 0);
    const auto lanes = whole ? 0xffffffffu : (1u << columns) - 1;
    Code* waiting = memory_.waiting + row * kBlock;
    Code* to = call_.result + (here.first_row + row) * call_.result_row + here.first_column + column;
    for (std::size_t i = 0; i < rows; ++i, sums += sums_row, to += call_.result_row, waiting += kBlock) {
      const __m512i codes =
          Tiles::rounded(Floats(_mm512_load_ps(sums)) + bias[0], Floats(_mm512_load_ps(sums + 16)) + bias[1]);
      if (!past_caches_ || !whole) {
        _mm512_mask_storeu_epi16(to, lanes, codes);
      } else if (waits) {
        _mm512_store_si512(waiting, codes);
      } else {
        if (!is_first_of_two)
          _mm512_stream_si512(reinterpret_cast<__m512i*>(to - kBlock), _mm512_load_si512(waiting));
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), codes);
      }
    }
  }

  const ProductCall& call_;
  const ProductPart& part_;
  const Plan& plan_;
  const Memory& memory_;
  Source left_, right_;
  bool past_caches_;
};

std::size_t bytes_of(const ProductCall& call, const ProductPart& part) {
  return Memory(Plan(call, part), nullptr).bytes;
}

void multiply_part(const ProductCall& call, const ProductPart& part, void* scratch) {
  const Plan plan(call, part);
  const Memory memory(plan, scratch);
  Tiles::configure();
  Multiplication(call, part, plan, memory).run();
  Tiles::release();
}

}  // namespace

constinit const ProductLoops kAmxProduct = {.bytes = bytes_of, .multiply = multiply_part};

}  // namespace halfstep
