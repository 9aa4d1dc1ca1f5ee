// Which pages of a range may be resident: one bit a page.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace halfstep {

class PageMap {
 public:
  void grow_to(std::size_t page_count) { words_.resize((page_count + 63) / 64, 0); }

  std::size_t count(std::size_t first, std::size_t last) const {
    std::size_t found = 0;
    for_each_word(first, last, [&](std::size_t word, std::uint64_t mask) {
      found += static_cast<std::size_t>(std::popcount(words_[word] & mask));
    });
    return found;
  }

  void set(std::size_t first, std::size_t last) {
    for_each_word(first, last, [&](std::size_t word, std::uint64_t mask) { words_[word] |= mask; });
  }

  void clear(std::size_t first, std::size_t last) {
    for_each_word(first, last, [&](std::size_t word, std::uint64_t mask) { words_[word] &= ~mask; });
  }

 private:
  /// visit(word, bits of it) over the pages first..last-1.
  template <typename Visit>
  static void for_each_word(std::size_t first, std::size_t last, Visit visit) {
    for (std::size_t page = first; page < last;) {
      const std::size_t bit = page % 64, pages = std::min(last - page, 64 - bit);
      const std::uint64_t ones = pages == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << pages) - 1;
      visit(page / 64, ones << bit);
      page += pages;
    }
  }

  std::vector<std::uint64_t> words_;
};

}  // namespace halfstep
