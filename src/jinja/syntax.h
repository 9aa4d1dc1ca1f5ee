// The tree of a parsed Jinja template.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "jinja/builtins.h"
#include "jinja/value.h"

namespace halfstep::jinja {

enum class Operator : uint8_t {
  Add,
  Subtract,
  Multiply,
  Divide,
  FloorDivide,
  Modulo,
  Power,
  Equal,
  NotEqual,
  Less,
  LessEqual,
  Greater,
  GreaterEqual,
  In,
  NotIn
};

struct Expression;
using ExpressionPointer = std::unique_ptr<Expression>;

/// What the operands are, by kind. Chains are one node, however long: a + b - c, a < b < c, a or b or c, a ~
/// b.
struct Expression {
  enum class Kind : uint8_t {
    Constant,
    Name,
    List,
    Tuple,
    Dict,  ///< key, value, key, value, ...
    Not,
    And,
    Or,
    Condition,   ///< test, then, else or null
    Compare,     ///< by `operators`
    Arithmetic,  ///< by `operators`, from the left
    Concat,
    Negative,
    Positive,
    Attribute,      ///< of the operand, by `name`
    LoopAttribute,  ///< loop.name
    Item,           ///< value, key
    Slice,          ///< value, start, stop, step; null where nothing is given
    Call,           ///< what is called, arguments
    Filter,         ///< what is filtered (null: the body of a block), arguments
    Test,           ///< what is tested, arguments
  };

  Kind kind;
  int line;
  int height = 1;
  std::vector<ExpressionPointer> operands = {};
  std::vector<Operator> operators = {};
  std::string name = {};
  Value constant = None{};
  const Builtin* builtin = nullptr;                                   ///< of a Filter or Test
  std::vector<std::pair<std::string, ExpressionPointer>> named = {};  ///< arguments by name
};

/// Names, attributes of namespaces, or tuples of targets.
struct Target {
  std::string name = {};
  std::string attribute = {};      ///< of the namespace `name`
  std::vector<Target> parts = {};  ///< of a tuple
  bool is_tuple = false;
};

struct Statement;
using Block = std::vector<Statement>;

struct MacroStatement {
  std::string name;
  std::vector<std::string> parameters;
  std::vector<ExpressionPointer> defaults;  ///< of the last parameters
  Block body;
};

struct Statement {
  enum class Kind : uint8_t {
    Text,         ///< `text`
    Output,       ///< `value`
    If,           ///< `branches`, `otherwise`
    For,          ///< `targets[0]` in `value` if `condition`: `body`; `otherwise`
    Set,          ///< `targets[0]` = `value`
    SetBlock,     ///< `targets[0]` = `body`, filtered by `value` if there is one
    With,         ///< `targets` = `values`: `body`
    FilterBlock,  ///< `body` filtered by `value`
    Scope,        ///< `body`, whose assignments end with it
    Macro,
    Break,
    Continue,
  };

  Kind kind;
  int line;
  std::string text = {};
  ExpressionPointer value = nullptr, condition = nullptr;
  std::vector<ExpressionPointer> values = {};
  std::vector<Target> targets = {};
  Block body = {}, otherwise = {};
  std::vector<std::pair<ExpressionPointer, Block>> branches = {};
  std::unique_ptr<MacroStatement> macro = nullptr;
};

/// An Error that begins with `where` and the line, for what is no template and for what is not supported.
Block parse(std::string_view source, std::string_view where);

}  // namespace halfstep::jinja
