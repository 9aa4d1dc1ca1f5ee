#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <initializer_list>

#include "jinja/syntax.h"
#include "jinja/tokens.h"
#include "words/names.h"

namespace halfstep::jinja {
namespace {

using Kind = Expression::Kind;

struct OperatorWord {
  std::string_view word;
  Operator meaning;
};

constexpr std::array<OperatorWord, 6> kComparisons{{{"==", Operator::Equal},
                                                    {"!=", Operator::NotEqual},
                                                    {"<", Operator::Less},
                                                    {"<=", Operator::LessEqual},
                                                    {">", Operator::Greater},
                                                    {">=", Operator::GreaterEqual}}};
constexpr std::array<OperatorWord, 2> kSums{{{"+", Operator::Add}, {"-", Operator::Subtract}}};
constexpr std::array<OperatorWord, 4> kProducts{{{"*", Operator::Multiply},
                                                 {"/", Operator::Divide},
                                                 {"//", Operator::FloorDivide},
                                                 {"%", Operator::Modulo}}};
constexpr std::array<OperatorWord, 1> kPowers{{{"**", Operator::Power}}};

class Parser {
 public:
  Parser(std::vector<Token> tokens, std::string_view where) : tokens_(std::move(tokens)), where_(where) {}

  Block run() {
    Block block = parse_block({});
    if (current().kind != Token::Kind::End) fail("unexpected ", described(current()), ".");
    return block;
  }

 private:
  // Tokens
  // -------------------------------------------------------------------------------------------------------

  template <typename... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    fail_at(where_, current().line, parts...);
  }

  const Token& current() const { return tokens_[at_]; }
  const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  const Token& take() { return tokens_[current().kind == Token::Kind::End ? at_ : at_++]; }

  static bool is(const Token& token, Token::Kind kind, std::string_view text) {
    return token.kind == kind && token.text == text;
  }
  bool at_operator(std::string_view text) const { return is(current(), Token::Kind::Operator, text); }
  bool at_name(std::string_view text) const { return is(current(), Token::Kind::Name, text); }
  bool at_kind(Token::Kind kind) const { return current().kind == kind; }
  bool take_operator(std::string_view text) {
    if (!at_operator(text)) return false;
    take();
    return true;
  }
  bool take_name(std::string_view text) {
    if (!at_name(text)) return false;
    take();
    return true;
  }
  void expect_operator(std::string_view text) {
    if (!take_operator(text)) fail("'", text, "' is expected, not ", described(current()), ".");
  }
  std::string expect_name() {
    if (!at_kind(Token::Kind::Name)) fail("a name is expected, not ", described(current()), ".");
    return take().text;
  }
  void expect(Token::Kind kind, std::string_view text) {
    if (!at_kind(kind)) fail("'", text, "' is expected, not ", described(current()), ".");
    if (kind == Token::Kind::TagEnd) check_safe(nullptr);
    take();
  }

  static std::string described(const Token& token) {
    switch (token.kind) {
      case Token::Kind::End:
        return "the end of the template";
      case Token::Kind::TagEnd:
        return "'%}'";
      case Token::Kind::OutputEnd:
        return "'}}'";
      case Token::Kind::String:
        return "the string " + in_quotes(token.text);
      default:
        return in_quotes(token.text);
    }
  }

  // One level of nesting, for as long as it lives.
  class Nested {
   public:
    explicit Nested(Parser& parser) : parser_(parser) { parser_.check_height(++parser_.depth_); }
    ~Nested() { --parser_.depth_; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;

   private:
    Parser& parser_;
  };
  void check_height(int height) const {
    if (height > kMaxHeight) fail("the template nests deeper than ", kMaxHeight, " levels.");
  }

  // Expressions
  // --------------------------------------------------------------------------------------------------

  ExpressionPointer made(Kind kind, int line, std::vector<ExpressionPointer> operands) const {
    auto expression = std::make_unique<Expression>(Expression{.kind = kind, .line = line});
    expression->operands = std::move(operands);
    for (const ExpressionPointer& operand : expression->operands) grow(*expression, operand.get());
    return expression;
  }
  template <typename... Operands>
  ExpressionPointer made(Kind kind, int line, Operands... operands) const {
    std::vector<ExpressionPointer> all;
    (all.push_back(std::move(operands)), ...);
    return made(kind, line, std::move(all));
  }
  void grow(Expression& node, const Expression* child) const {
    if (child == nullptr) return;
    node.height = std::max(node.height, 1 + child->height);
    check_height(node.height);
  }
  ExpressionPointer constant(int line, Value value) const {
    ExpressionPointer expression = made(Kind::Constant, line);
    expression->constant = std::move(value);
    return expression;
  }

  // "a, b" is a tuple, "a" is not.
  ExpressionPointer parse_tuple(bool with_condition, bool in_brackets = false) {
    const int line = current().line;
    std::vector<ExpressionPointer> parts;
    bool is_tuple = false;
    while (true) {
      if (at_kind(Token::Kind::OutputEnd) || at_kind(Token::Kind::TagEnd) || at_operator(")")) break;
      parts.push_back(with_condition ? parse_expression() : parse_or());
      if (!take_operator(",")) break;
      is_tuple = true;
    }
    if (!is_tuple && !parts.empty()) return std::move(parts[0]);
    if (!is_tuple && !in_brackets) fail("an expression is expected, not ", described(current()), ".");
    return made(Kind::Tuple, line, std::move(parts));
  }

  ExpressionPointer parse_expression() {
    const Nested nested(*this);
    ExpressionPointer value = parse_or();
    while (at_name("if")) {
      const int line = take().line;
      ExpressionPointer test = parse_or();
      ExpressionPointer otherwise = take_name("else") ? parse_expression() : nullptr;
      value = made(Kind::Condition, line, std::move(test), std::move(value), std::move(otherwise));
    }
    return value;
  }

  ExpressionPointer parse_or() {
    return parse_words("or", Kind::Or,
                       [&] { return parse_words("and", Kind::And, [&] { return parse_not(); }); });
  }

  ExpressionPointer parse_words(std::string_view word, Kind kind, auto&& parse_one) {
    const int line = current().line;
    std::vector<ExpressionPointer> parts;
    parts.push_back(parse_one());
    while (take_name(word)) parts.push_back(parse_one());
    return parts.size() == 1 ? std::move(parts[0]) : made(kind, line, std::move(parts));
  }

  ExpressionPointer parse_not() {
    if (!at_name("not")) return parse_compare();
    const Nested nested(*this);
    const int line = take().line;
    return made(Kind::Not, line, parse_not());
  }

  ExpressionPointer parse_compare() {
    const int line = current().line;
    std::vector<ExpressionPointer> parts;
    std::vector<Operator> operators;
    parts.push_back(parse_sum());
    while (const auto next = comparison()) {
      operators.push_back(*next);
      parts.push_back(parse_sum());
    }
    return chain(Kind::Compare, line, std::move(parts), std::move(operators));
  }

  std::optional<Operator> comparison() {
    if (at_kind(Token::Kind::Operator))
      for (const OperatorWord& known : kComparisons)
        if (take_operator(known.word)) return known.meaning;
    if (take_name("in")) return Operator::In;
    if (!at_name("not") || !is(ahead(), Token::Kind::Name, "in")) return std::nullopt;
    take();
    take();
    return Operator::NotIn;
  }

  ExpressionPointer chain(Kind kind, int line, std::vector<ExpressionPointer> parts,
                          std::vector<Operator> operators) const {
    if (operators.empty()) return std::move(parts[0]);
    ExpressionPointer expression = made(kind, line, std::move(parts));
    expression->operators = std::move(operators);
    return expression;
  }

  ExpressionPointer parse_arithmetic(const auto& words, auto&& parse_one) {
    const int line = current().line;
    std::vector<ExpressionPointer> parts;
    std::vector<Operator> operators;
    parts.push_back(parse_one());
    const auto next = [&] {
      return std::ranges::find_if(words, [&](const OperatorWord& known) { return at_operator(known.word); });
    };
    for (auto known = next(); known != words.end(); known = next()) {
      take();
      operators.push_back(known->meaning);
      parts.push_back(parse_one());
    }
    return chain(Kind::Arithmetic, line, std::move(parts), std::move(operators));
  }

  // In Jinja '~' binds tighter than '+', and '**' goes from the left.
  ExpressionPointer parse_sum() {
    return parse_arithmetic(kSums, [&] { return parse_concat(); });
  }
  ExpressionPointer parse_concat() {
    const int line = current().line;
    std::vector<ExpressionPointer> parts;
    parts.push_back(parse_product());
    while (take_operator("~")) parts.push_back(parse_product());
    return parts.size() == 1 ? std::move(parts[0]) : made(Kind::Concat, line, std::move(parts));
  }
  ExpressionPointer parse_product() {
    return parse_arithmetic(kProducts, [&] { return parse_power(); });
  }
  ExpressionPointer parse_power() {
    return parse_arithmetic(kPowers, [&] { return parse_unary(true); });
  }

  ExpressionPointer parse_unary(bool with_filters) {
    const int line = current().line;
    ExpressionPointer value;
    if (at_operator("-") || at_operator("+")) {
      const Nested nested(*this);
      const Kind kind = take().text == "-" ? Kind::Negative : Kind::Positive;
      value = made(kind, line, parse_unary(false));
    } else {
      value = parse_primary();
    }
    value = parse_postfix(std::move(value));
    return with_filters ? parse_filters_and_tests(std::move(value)) : std::move(value);
  }

  ExpressionPointer parse_primary() {
    const int line = current().line;
    switch (current().kind) {
      case Token::Kind::Name:
        return parse_name();
      case Token::Kind::String: {
        std::string text = take().text;
        while (at_kind(Token::Kind::String)) text += take().text;
        return constant(line, Value::text(std::move(text)));
      }
      case Token::Kind::Integer:
        return constant(line, parse_integer(take().text));
      case Token::Kind::Float:
        return constant(line, std::strtod(take().text.c_str(), nullptr));
      default:
        break;
    }
    if (take_operator("(")) {
      ExpressionPointer inside = parse_tuple(true, true);
      expect_operator(")");
      return inside;
    }
    if (take_operator("["))
      return made(Kind::List, line,
                  parse_parts("]", [&](auto& parts) { parts.push_back(parse_expression()); }));
    if (take_operator("{"))
      return made(Kind::Dict, line, parse_parts("}", [&](auto& parts) {
                    parts.push_back(parse_expression());
                    expect_operator(":");
                    parts.push_back(parse_expression());
                  }));
    fail("a value is expected, not ", described(current()), ".");
  }

  std::vector<ExpressionPointer> parse_parts(std::string_view end, auto&& parse_one) {
    std::vector<ExpressionPointer> parts;
    while (!at_operator(end)) {
      if (!parts.empty()) expect_operator(",");
      if (at_operator(end)) break;
      parse_one(parts);
    }
    expect_operator(end);
    return parts;
  }

  Value parse_integer(const std::string& digits) const {
    std::string_view rest = digits;
    int base = 10;
    if (rest.size() > 2 && rest[0] == '0') {
      const char letter = static_cast<char>(rest[1] | 0x20);
      base = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 10;
      if (base != 10) rest.remove_prefix(2);
    }
    int64_t number = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), number, base);
    if (error != std::errc{}) fail("the number ", in_quotes(digits), " needs more than 64 bits.");
    return number;
  }

  ExpressionPointer parse_name() {
    const int line = current().line;
    const std::string name = take().text;
    if (name == "true" || name == "True") return constant(line, true);
    if (name == "false" || name == "False") return constant(line, false);
    if (name == "none" || name == "None") return constant(line, None{});
    if (name == "loop") return parse_loop(line);
    for (const std::string_view unsupported : {"lipsum", "cycler", "joiner", "self", "super"})
      if (name == unsupported) fail("'", name, "' is not supported.");
    for (const std::string_view special : {"caller", "varargs", "kwargs"})
      if (macro_ != nullptr && name == special &&
          std::ranges::find(macro_->parameters, name) == macro_->parameters.end())
        fail("'", name, "' inside a macro is not supported.");
    ExpressionPointer expression = made(Kind::Name, line);
    expression->name = name;
    return expression;
  }

  // A loop is no value of its own: it ends with its last turn.
  ExpressionPointer parse_loop(int line) {
    constexpr std::array<std::string_view, 13> kKnown{"index",  "index0", "revindex", "revindex0", "first",
                                                      "last",   "length", "previtem", "nextitem",  "depth",
                                                      "depth0", "cycle",  "changed"};
    if (!take_operator(".")) fail("'loop' is supported as loop.index and the like only.");
    ExpressionPointer expression = made(Kind::LoopAttribute, line);
    expression->name = expect_name();
    if (std::ranges::find(kKnown, expression->name) == kKnown.end())
      fail("'loop.", expression->name, "' is not supported.");
    const bool is_call = expression->name == "cycle" || expression->name == "changed";
    if (is_call != at_operator("("))
      fail("'loop.", expression->name, is_call ? "' must be" : "' cannot be", " called.");
    if (is_call) {
      take();
      parse_arguments(*expression);
      if (!expression->named.empty()) fail("'loop.", expression->name, "' has no named arguments.");
    }
    return expression;
  }

  ExpressionPointer parse_postfix(ExpressionPointer value) {
    while (at_kind(Token::Kind::Operator)) {
      const int line = current().line;
      if (take_operator("."))
        value = parse_attribute(std::move(value), line);
      else if (take_operator("["))
        value = parse_subscript(std::move(value), line);
      else if (take_operator("("))
        value = parse_call(std::move(value), line);
      else
        break;
    }
    return value;
  }

  ExpressionPointer parse_attribute(ExpressionPointer value, int line) {
    if (at_kind(Token::Kind::Integer)) {
      ExpressionPointer index = constant(line, parse_integer(take().text));
      return made(Kind::Item, line, std::move(value), std::move(index));
    }
    ExpressionPointer expression = made(Kind::Attribute, line, std::move(value));
    expression->name = expect_name();
    return expression;
  }

  ExpressionPointer parse_subscript(ExpressionPointer value, int line) {
    ExpressionPointer start;
    if (!at_operator(":")) {
      start = parse_tuple_in_subscript(line);
      if (take_operator("]")) return made(Kind::Item, line, std::move(value), std::move(start));
    }
    expect_operator(":");
    const auto part = [&] { return at_operator(":") || at_operator("]") ? nullptr : parse_expression(); };
    ExpressionPointer stop = part();
    ExpressionPointer step = take_operator(":") ? part() : nullptr;
    if (at_operator(",")) fail("slices in several dimensions are not supported.");
    expect_operator("]");
    return made(Kind::Slice, line, std::move(value), std::move(start), std::move(stop), std::move(step));
  }

  ExpressionPointer parse_tuple_in_subscript(int line) {
    std::vector<ExpressionPointer> parts;
    parts.push_back(parse_expression());
    while (take_operator(",")) parts.push_back(parse_expression());
    return parts.size() == 1 ? std::move(parts[0]) : made(Kind::Tuple, line, std::move(parts));
  }

  // Behind the opening bracket.
  void parse_arguments(Expression& call) {
    while (!at_operator(")")) {
      if (at_operator("*") || at_operator("**")) fail("arguments by '*' and '**' are not supported.");
      if (at_kind(Token::Kind::Name) && is(ahead(), Token::Kind::Operator, "=")) {
        std::string name = take().text;
        take();
        for (const auto& [other, value] : call.named)
          if (other == name) fail("the argument ", in_quotes(name), " is given twice.");
        call.named.emplace_back(std::move(name), parse_expression());
        grow(call, call.named.back().second.get());
      } else {
        if (!call.named.empty()) fail("an argument without a name follows one with a name.");
        call.operands.push_back(parse_expression());
        grow(call, call.operands.back().get());
      }
      if (!take_operator(",")) break;
    }
    expect_operator(")");
  }

  ExpressionPointer parse_call(ExpressionPointer callee, int line) {
    if (callee->kind == Kind::Attribute && !is_method(callee->name))
      fail("the method ", in_quotes(callee->name), " is not supported.");
    ExpressionPointer call = made(Kind::Call, line, std::move(callee));
    parse_arguments(*call);
    return call;
  }

  ExpressionPointer parse_filters_and_tests(ExpressionPointer value) {
    while (true) {
      const int line = current().line;
      if (take_operator("|"))
        value = parse_filter(std::move(value), line);
      else if (take_name("is"))
        value = parse_test(std::move(value), line);
      else if (take_operator("("))
        value = parse_call(std::move(value), line);
      else
        return value;
    }
  }

  /// Of a block: all that follow one another.
  ExpressionPointer parse_filters(ExpressionPointer value) {
    while (at_operator("|")) {
      const int line = take().line;
      value = parse_filter(std::move(value), line);
    }
    return value;
  }

  ExpressionPointer parse_filter(ExpressionPointer value, int line) {
    const std::string name = expect_name();
    ExpressionPointer filter = made(Kind::Filter, line, std::move(value));
    filter->builtin = find_filter(name);
    if (filter->builtin == nullptr) fail("the filter ", in_quotes(name), " is not supported.");
    if (take_operator("(")) parse_arguments(*filter);
    const bool by_attribute = name == "selectattr" || name == "rejectattr";
    if (name == "map") check_name_in(*filter, 1, find_filter, "filter");
    if (name == "select" || name == "reject" || by_attribute)
      check_name_in(*filter, by_attribute ? 2 : 1, find_test, "test");
    if (name == "safe") {
      check_safe(nullptr);
      safe_ = filter.get();
    }
    return filter;
  }

  // Jinja2 escapes what is added to a text marked as safe: only one that is printed at once stays as it is.
  void check_safe(const Expression* printed) {
    if (safe_ != nullptr && safe_ != printed)
      fail("the filter 'safe' is supported at the end of {{ }} only.");
    safe_ = nullptr;
  }

  // A filter or test that another one is given by name.
  void check_name_in(const Expression& call, size_t place, const Builtin* (*find)(std::string_view),
                     std::string_view kind) const {
    if (call.operands.size() <= place || call.operands[place]->kind != Kind::Constant) return;
    const Value& name = call.operands[place]->constant;
    if (name.is_text() && find(name.text()) == nullptr)
      fail("the ", kind, " ", in_quotes(name.text()), " is not supported.");
  }

  ExpressionPointer parse_test(ExpressionPointer value, int line) {
    const bool negated = take_name("not");
    const std::string name = expect_name();
    ExpressionPointer test = made(Kind::Test, line, std::move(value));
    test->builtin = find_test(name);
    if (test->builtin == nullptr) fail("the test ", in_quotes(name), " is not supported.");
    if (take_operator("(")) {
      parse_arguments(*test);
    } else if (begins_argument_of_test()) {
      if (at_name("is")) fail("'is' after 'is'; put the first test in brackets.");
      const Nested nested(*this);
      test->operands.push_back(parse_postfix(parse_primary()));
      grow(*test, test->operands.back().get());
    }
    return negated ? made(Kind::Not, line, std::move(test)) : std::move(test);
  }

  bool begins_argument_of_test() const {
    switch (current().kind) {
      case Token::Kind::Name:
        return !at_name("else") && !at_name("or") && !at_name("and");
      case Token::Kind::String:
      case Token::Kind::Integer:
      case Token::Kind::Float:
        return true;
      default:
        return at_operator("[") || at_operator("{");
    }
  }

  // Statements
  // ---------------------------------------------------------------------------------------------------

  // Up to a tag with one of these names, which is left to the caller.
  Block parse_block(std::initializer_list<std::string_view> ends) {
    Block block;
    while (!at_kind(Token::Kind::End)) {
      const int line = current().line;
      if (at_kind(Token::Kind::Data)) {
        block.push_back({.kind = Statement::Kind::Text, .line = line, .text = take().text});
      } else if (at_kind(Token::Kind::OutputBegin)) {
        take();
        Statement output{.kind = Statement::Kind::Output, .line = line};
        output.value = parse_tuple(true);
        check_safe(output.value.get());
        expect(Token::Kind::OutputEnd, "}}");
        block.push_back(std::move(output));
      } else {
        expect(Token::Kind::TagBegin, "{%");
        if (at_kind(Token::Kind::Name) && std::ranges::find(ends, current().text) != ends.end()) return block;
        block.push_back(parse_statement());
        expect(Token::Kind::TagEnd, "%}");
      }
    }
    if (ends.size() > 0) fail("the template ends before {% ", *(ends.end() - 1), " %}.");
    return block;
  }

  // The body of a tag, from behind its head to its end's name.
  Block parse_body(std::initializer_list<std::string_view> ends) {
    const Nested nested(*this);
    take_operator(":");
    expect(Token::Kind::TagEnd, "%}");
    return parse_block(ends);
  }

  // A body whose assignments end with it.
  Block parse_scope(std::string_view end) {
    ++scopes_;
    Block body = parse_body({end});
    --scopes_;
    take();
    return body;
  }

  Statement parse_statement() {
    if (!at_kind(Token::Kind::Name)) fail("the name of a tag is expected, not ", described(current()), ".");
    const int line = current().line;
    const std::string tag = take().text;
    if (tag == "if") return parse_if(line);
    if (tag == "for") return parse_for(line);
    if (tag == "set") return parse_set(line);
    if (tag == "macro") return parse_macro(line);
    if (tag == "with") return parse_with(line);
    if (tag == "filter") return parse_filter_block(line);
    if (tag == "generation") return parse_generation(line);
    if (tag == "print") return parse_print(line);
    if (tag == "break" || tag == "continue") {
      if (loops_ == 0) fail("{% ", tag, " %} is outside a loop.");
      return {.kind = tag == "break" ? Statement::Kind::Break : Statement::Kind::Continue, .line = line};
    }
    if (tag.starts_with("end") || tag == "else" || tag == "elif") fail("{% ", tag, " %} closes nothing.");
    fail("the tag ", in_quotes(tag), " is not supported.");
  }

  Statement parse_if(int line) {
    Statement statement{.kind = Statement::Kind::If, .line = line};
    while (true) {
      ExpressionPointer test = parse_tuple(false);
      statement.branches.emplace_back(std::move(test), parse_body({"elif", "else", "endif"}));
      const std::string end = take().text;
      if (end == "elif") continue;
      if (end == "else") {
        statement.otherwise = parse_body({"endif"});
        take();
      }
      return statement;
    }
  }

  Statement parse_for(int line) {
    Statement statement{.kind = Statement::Kind::For, .line = line};
    statement.targets.push_back(parse_target(false));
    if (!take_name("in")) fail("'in' is expected, not ", described(current()), ".");
    statement.value = parse_tuple(false);
    if (take_name("if")) statement.condition = parse_expression();
    if (at_name("recursive")) fail("recursive loops are not supported.");
    ++loops_;
    ++scopes_;
    statement.body = parse_body({"else", "endfor"});
    --loops_;
    if (take().text == "else") {
      statement.otherwise = parse_body({"endfor"});
      take();
    }
    --scopes_;
    return statement;
  }

  Statement parse_set(int line) {
    Statement statement{.kind = Statement::Kind::Set, .line = line};
    statement.targets.push_back(parse_target(true));
    if (take_operator("=")) {
      statement.value = parse_tuple(true);
    } else {
      statement.kind = Statement::Kind::SetBlock;
      statement.value = parse_filters(nullptr);
      statement.body = parse_scope("endset");
    }
    return statement;
  }

  Statement parse_with(int line) {
    Statement statement{.kind = Statement::Kind::With, .line = line};
    while (!at_kind(Token::Kind::TagEnd)) {
      if (!statement.targets.empty()) expect_operator(",");
      statement.targets.push_back(parse_target(false));
      expect_operator("=");
      statement.values.push_back(parse_expression());
    }
    statement.body = parse_scope("endwith");
    return statement;
  }

  Statement parse_filter_block(int line) {
    Statement statement{.kind = Statement::Kind::FilterBlock, .line = line};
    statement.value = parse_filters(parse_filter(nullptr, line));
    statement.body = parse_scope("endfilter");
    return statement;
  }

  // transformers' tag around what the assistant says. A loop outside cannot be left from within: its body is
  // a function there.
  Statement parse_generation(int line) {
    Statement statement{.kind = Statement::Kind::Scope, .line = line};
    const int outer_loops = std::exchange(loops_, 0);
    statement.body = parse_scope("endgeneration");
    loops_ = outer_loops;
    return statement;
  }

  Statement parse_print(int line) {
    Statement statement{.kind = Statement::Kind::Output, .line = line};
    std::vector<ExpressionPointer> parts;
    while (!at_kind(Token::Kind::TagEnd)) {
      if (!parts.empty()) expect_operator(",");
      parts.push_back(parse_expression());
    }
    statement.value = made(Kind::Concat, line, std::move(parts));
    return statement;
  }

  Statement parse_macro(int line) {
    if (scopes_ > 0)
      fail("a macro inside a loop, a macro or another block is not supported; define it outside.");
    Statement statement{.kind = Statement::Kind::Macro, .line = line};
    statement.macro = std::make_unique<MacroStatement>();
    MacroStatement& macro = *statement.macro;
    macro.name = expect_target_name();
    expect_operator("(");
    while (!at_operator(")")) {
      if (!macro.parameters.empty()) expect_operator(",");
      macro.parameters.push_back(expect_target_name());
      if (take_operator("=")) {
        macro.defaults.push_back(parse_expression());
      } else if (!macro.defaults.empty()) {
        fail("a parameter without a default follows one with a default.");
      }
    }
    expect_operator(")");
    macro_ = &macro;
    macro.body = parse_scope("endmacro");
    macro_ = nullptr;
    return statement;
  }

  std::string expect_target_name() {
    std::string name = expect_name();
    for (const std::string_view reserved : {"true", "True", "false", "False", "none", "None", "loop"})
      if (name == reserved) fail("nothing can be assigned to '", name, "'.");
    return name;
  }

  Target parse_target(bool with_namespace) {
    const Nested nested(*this);
    Target target = parse_one_target(with_namespace);
    if (!at_operator(",")) return target;
    Target tuple{.is_tuple = true};
    tuple.parts.push_back(std::move(target));
    while (take_operator(",")) {
      if (at_name("in") || at_operator("=") || at_operator(")") || at_kind(Token::Kind::TagEnd)) break;
      tuple.parts.push_back(parse_one_target(with_namespace));
    }
    return tuple;
  }

  Target parse_one_target(bool with_namespace) {
    if (take_operator("(")) {
      Target inside = parse_target(false);
      expect_operator(")");
      return inside;
    }
    Target target{.name = expect_target_name()};
    if (with_namespace && take_operator(".")) {
      target.attribute = expect_name();
      if (target.attribute.starts_with('_'))
        fail("a namespace has no attribute '", target.attribute, "': it begins with '_'.");
    }
    return target;
  }

  std::vector<Token> tokens_;
  std::string_view where_;
  size_t at_ = 0;
  int depth_ = 0;
  int scopes_ = 0, loops_ = 0;             // around this place
  const MacroStatement* macro_ = nullptr;  // around this place
  const Expression* safe_ = nullptr;       // the filter 'safe', while it is not known what is done with it
};

}  // namespace

Block parse(std::string_view source, std::string_view where) {
  return Parser(tokens_of(source, where), where).run();
}

}  // namespace halfstep::jinja
