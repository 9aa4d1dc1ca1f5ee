#include "jinja/template.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <map>

#include "words/names.h"

namespace halfstep::jinja {
namespace {

// A turn of a loop, and what it can look ahead to. The condition of a loop is asked as late as possible: it
// may depend on what the body does.
class Loop {
 public:
  using Accepts = std::function<bool(const Value&)>;
  Loop(std::vector<Value> items, Accepts accepts) : items_(std::move(items)), accepts_(std::move(accepts)) {}

  std::optional<Value> next() {
    peek();
    before_ = std::exchange(current_, std::exchange(after_, std::nullopt));
    if (current_) ++index0_;
    return current_;
  }

  Value attribute(Run& run, std::string_view name) {
    if (name == "index") return index0_ + 1;
    if (name == "index0") return index0_;
    if (name == "first") return index0_ == 0;
    if (name == "last") return !peek();
    if (name == "length") return length();
    if (name == "revindex") return length() - index0_;
    if (name == "revindex0") return length() - index0_ - 1;
    if (name == "previtem") return before_ ? *before_ : Value::undefined("there is no previous item.");
    if (name == "nextitem") return peek() ? *after_ : Value::undefined("there is no next item.");
    if (name == "depth") return int64_t{1};
    if (name == "depth0") return int64_t{0};
    run.fail("'loop.", name, "' is not supported.");
  }

  Value call(Run& run, std::string_view name, std::vector<Value> arguments) {
    if (name == "cycle") {
      if (arguments.empty()) run.fail("'loop.cycle' needs arguments.");
      return arguments[static_cast<size_t>(index0_) % arguments.size()];
    }
    Value now = make_sequence(run, Sequence::Kind::Tuple, std::move(arguments));
    if (last_changed_ && equal(run, *last_changed_, now)) return false;
    last_changed_ = std::move(now);
    return true;
  }

 private:
  bool peek() {
    while (!after_ && at_ < items_.size()) {
      Value& item = items_[at_++];
      if (!accepts_ || accepts_(item)) after_ = std::move(item);
    }
    return after_.has_value();
  }

  // All that follow are asked for, and are kept.
  int64_t length() {
    if (!length_) {
      peek();
      if (accepts_) {
        items_.erase(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(at_));
        std::erase_if(items_, [&](const Value& item) { return !accepts_(item); });
        at_ = 0;
        accepts_ = nullptr;
      }
      length_ = index0_ + 1 + static_cast<int64_t>(items_.size() - at_) + after_.has_value();
    }
    return *length_;
  }

  std::vector<Value> items_;
  Accepts accepts_;
  size_t at_ = 0;
  int64_t index0_ = -1;
  std::optional<Value> before_, current_, after_, last_changed_;
  std::optional<int64_t> length_;
};

struct Scope {
  const Scope* parent = nullptr;
  std::map<std::string, Value, std::less<>> variables = {};
  Loop* loop = nullptr;
};

enum class Flow : uint8_t { On, Break, Continue };

class Renderer {
 public:
  Renderer(Run& run, const Template::Variables& variables) : run_(run) {
    for (const auto& [name, value] : variables) root_.variables[name] = value;
  }

  std::string render(const Block& block) {
    execute(block);
    return std::move(output_);
  }

 private:
  // Names
  // --------------------------------------------------------------------------------------------------------

  Value resolve(const std::string& name) {
    for (const Scope* scope = scope_; scope != nullptr; scope = scope->parent) {
      const auto found = scope->variables.find(name);
      if (found != scope->variables.end()) return found->second;
    }
    if (name == "namespace") return Value(std::make_shared<const Callable>());
    if (const Builtin* function = find_function(name))
      return Value(std::make_shared<const Callable>(Callable{.builtin = function}));
    return Value::undefined(detail::concat(in_quotes(name), " is undefined."));
  }

  // Makes a scope the current one for as long as it lives.
  class Inside {
   public:
    Inside(Renderer& renderer, Scope& scope) : renderer_(renderer), outer_(renderer.scope_) {
      renderer_.scope_ = &scope;
    }
    ~Inside() { renderer_.scope_ = outer_; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    Renderer& renderer_;
    Scope* outer_;
  };

  void assign(const Target& target, const Value& value) {
    if (target.is_tuple) {
      const std::vector<Value> parts = items_of(run_, value);
      if (parts.size() != target.parts.size())
        run_.fail(parts.size(), " values are assigned to ", target.parts.size(), " names.");
      for (size_t i = 0; i < parts.size(); ++i) assign(target.parts[i], parts[i]);
    } else if (target.attribute.empty()) {
      scope_->variables[target.name] = value;
    } else {
      const Value owner = resolve(target.name);
      if (!owner.is<Namespace*>())
        run_.fail("'", target.name, ".", target.attribute, "' is assigned to, but '", target.name,
                  "' is not a namespace.");
      owner.as<Namespace*>()->attributes[target.attribute] = value;
    }
  }

  // Statements
  // ---------------------------------------------------------------------------------------------------

  void print(std::string_view text) {
    run_.charge_text(text.size());
    run_.check_text(output_.size() + text.size());
    output_ += text;
  }

  Flow execute(const Block& block) {
    const Run::Level level(run_);
    for (const Statement& statement : block)
      if (const Flow flow = execute(statement); flow != Flow::On) return flow;
    return Flow::On;
  }

  Flow execute(const Statement& statement) {
    run_.stands_at(statement.line);
    run_.charge(1);
    switch (statement.kind) {
      case Statement::Kind::Text:
        print(statement.text);
        break;
      case Statement::Kind::Output:
        execute_output(statement);
        break;
      case Statement::Kind::If:
        return execute_if(statement);
      case Statement::Kind::For:
        return execute_for(statement);
      case Statement::Kind::Set:
        assign(statement.targets[0], evaluate(*statement.value));
        break;
      case Statement::Kind::SetBlock:
      case Statement::Kind::FilterBlock:
        return execute_captured(statement);
      case Statement::Kind::With:
        return execute_with(statement);
      case Statement::Kind::Scope: {
        Scope scope{.parent = scope_};
        const Inside inside(*this, scope);
        return execute(statement.body);
      }
      case Statement::Kind::Macro:
        scope_->variables[statement.macro->name] =
            std::make_shared<const Callable>(Callable{.macro = statement.macro.get()});
        break;
      case Statement::Kind::Break:
        return Flow::Break;
      case Statement::Kind::Continue:
        return Flow::Continue;
    }
    return Flow::On;
  }

  void execute_output(const Statement& statement) {
    const Value value = evaluate(*statement.value);
    if (value.is_text())
      print(value.text());
    else
      print(to_text(run_, value));
  }

  Flow execute_if(const Statement& statement) {
    for (const auto& [test, body] : statement.branches)
      if (truth(evaluate(*test))) return execute(body);
    return execute(statement.otherwise);
  }

  Flow execute_for(const Statement& statement) {
    Loop::Accepts accepts;
    Scope* const outer = scope_;
    if (statement.condition) {
      accepts = [this, outer, &statement](const Value& item) {
        Scope scope{.parent = outer};
        const Inside inside(*this, scope);
        assign(statement.targets[0], item);
        return truth(evaluate(*statement.condition));
      };
    }
    Loop loop(items_of(run_, evaluate(*statement.value)), std::move(accepts));
    bool finished_a_turn = false;
    while (const std::optional<Value> item = loop.next()) {
      run_.charge(1);
      Scope scope{.parent = outer, .loop = &loop};
      const Inside inside(*this, scope);
      assign(statement.targets[0], *item);
      const Flow flow = execute(statement.body);
      if (flow == Flow::Break) break;
      finished_a_turn |= flow == Flow::On;
    }
    // As in Jinja2 3.1: also when every turn was left early (tests/text/chat_template_oracle.py shows it).
    if (finished_a_turn || statement.otherwise.empty()) return Flow::On;
    Scope scope{.parent = outer};
    const Inside inside(*this, scope);
    return execute(statement.otherwise);
  }

  // What a body prints, as text; nothing if the body leaves a loop around it.
  std::optional<std::string> captured(const Block& body, Flow& flow) {
    std::string outer = std::exchange(output_, "");
    Scope scope{.parent = scope_};
    const Inside inside(*this, scope);
    flow = execute(body);
    std::string text = std::exchange(output_, std::move(outer));
    return flow == Flow::On ? std::optional(std::move(text)) : std::nullopt;
  }

  Flow execute_captured(const Statement& statement) {
    Flow flow = Flow::On;
    auto text = captured(statement.body, flow);
    if (!text) return flow;
    Value value = Value::text(std::move(*text));
    if (statement.value) {
      block_ = value;
      value = evaluate(*statement.value);
    }
    if (statement.kind == Statement::Kind::SetBlock)
      assign(statement.targets[0], value);
    else
      print(to_text(run_, value));
    return Flow::On;
  }

  Flow execute_with(const Statement& statement) {
    std::vector<Value> values;
    for (const ExpressionPointer& value : statement.values) values.push_back(evaluate(*value));
    Scope scope{.parent = scope_};
    const Inside inside(*this, scope);
    for (size_t i = 0; i < values.size(); ++i) assign(statement.targets[i], values[i]);
    return execute(statement.body);
  }

  // Expressions
  // --------------------------------------------------------------------------------------------------

  using Kind = Expression::Kind;

  Value evaluate(const Expression& expression) {
    const Run::Level level(run_);
    run_.stands_at(expression.line);
    run_.charge(1);
    switch (expression.kind) {
      case Kind::Constant:
        return expression.constant;
      case Kind::Name:
        return resolve(expression.name);
      case Kind::List:
        return make_list(run_, evaluate_from(expression, 0));
      case Kind::Tuple:
        return make_sequence(run_, Sequence::Kind::Tuple, evaluate_from(expression, 0));
      case Kind::Dict:
        return evaluate_dict(expression);
      case Kind::Not:
        return !truth(evaluate(*expression.operands[0]));
      case Kind::And:
      case Kind::Or:
        return evaluate_words(expression);
      case Kind::Condition:
        return evaluate_condition(expression);
      case Kind::Compare:
        return evaluate_compare(expression);
      case Kind::Arithmetic:
        return evaluate_arithmetic(expression);
      case Kind::Concat:
        return evaluate_concat(expression);
      case Kind::Negative:
        return negate(run_, evaluate(*expression.operands[0]));
      case Kind::Positive:
        return positive(run_, evaluate(*expression.operands[0]));
      case Kind::Attribute:
        return get_attribute(run_, evaluate(*expression.operands[0]), expression.name);
      case Kind::LoopAttribute:
        return evaluate_loop(expression);
      case Kind::Item:
        return evaluate_item(expression);
      case Kind::Slice:
        return evaluate_slice(expression);
      case Kind::Call:
        return evaluate_call(expression);
      case Kind::Filter:
      case Kind::Test:
        return evaluate_builtin(expression);
    }
    HALFSTEP_BUG("an expression of an unknown kind");
  }

  std::vector<Value> evaluate_from(const Expression& expression, size_t first) {
    std::vector<Value> values;
    values.reserve(expression.operands.size() - first);
    for (size_t i = first; i < expression.operands.size(); ++i)
      values.push_back(evaluate(*expression.operands[i]));
    return values;
  }

  Value evaluate_dict(const Expression& expression) {
    DictBuilder builder(run_);
    for (size_t i = 0; i < expression.operands.size(); i += 2) {
      Value key = evaluate(*expression.operands[i]);
      builder.add(std::move(key), evaluate(*expression.operands[i + 1]));
    }
    return builder.build();
  }

  // The first operand that decides, or the last.
  Value evaluate_words(const Expression& expression) {
    const bool decides = expression.kind == Kind::Or;
    for (size_t i = 0; i + 1 < expression.operands.size(); ++i) {
      Value value = evaluate(*expression.operands[i]);
      if (truth(value) == decides) return value;
    }
    return evaluate(*expression.operands.back());
  }

  Value evaluate_condition(const Expression& expression) {
    if (truth(evaluate(*expression.operands[0]))) return evaluate(*expression.operands[1]);
    if (expression.operands[2]) return evaluate(*expression.operands[2]);
    return Value::undefined("an 'if' without 'else' is false.");
  }

  bool compare(Operator by, const Value& left, const Value& right) {
    switch (by) {
      case Operator::Equal:
        return equal(run_, left, right);
      case Operator::NotEqual:
        return !equal(run_, left, right);
      case Operator::Less:
        return less(run_, left, right);
      case Operator::LessEqual:
        return !less(run_, right, left);
      case Operator::Greater:
        return less(run_, right, left);
      case Operator::GreaterEqual:
        return !less(run_, left, right);
      case Operator::In:
        return contains(run_, right, left);
      case Operator::NotIn:
        return !contains(run_, right, left);
      default:
        HALFSTEP_BUG("a comparison by an arithmetic operator");
    }
  }

  Value evaluate_compare(const Expression& expression) {
    Value left = evaluate(*expression.operands[0]);
    for (size_t i = 0; i < expression.operators.size(); ++i) {
      Value right = evaluate(*expression.operands[i + 1]);
      if (!compare(expression.operators[i], left, right)) return false;
      left = std::move(right);
    }
    return true;
  }

  Value calculate(Operator by, const Value& left, const Value& right) {
    switch (by) {
      case Operator::Add:
        return add(run_, left, right);
      case Operator::Subtract:
        return subtract(run_, left, right);
      case Operator::Multiply:
        return multiply(run_, left, right);
      case Operator::Divide:
        return divide(run_, left, right);
      case Operator::FloorDivide:
        return floor_divide(run_, left, right);
      case Operator::Modulo:
        return modulo(run_, left, right);
      case Operator::Power:
        return power(run_, left, right);
      default:
        HALFSTEP_BUG("arithmetic by a comparison");
    }
  }

  Value evaluate_arithmetic(const Expression& expression) {
    Value result = evaluate(*expression.operands[0]);
    for (size_t i = 0; i < expression.operators.size(); ++i)
      result = calculate(expression.operators[i], result, evaluate(*expression.operands[i + 1]));
    return result;
  }

  Value evaluate_concat(const Expression& expression) {
    std::string text;
    for (const ExpressionPointer& operand : expression.operands) {
      text += to_text(run_, evaluate(*operand));
      run_.check_text(text.size());
    }
    return Value::text(std::move(text));
  }

  Value evaluate_loop(const Expression& expression) {
    const Scope* scope = scope_;
    while (scope != nullptr && scope->loop == nullptr) scope = scope->parent;
    if (scope == nullptr) run_.fail("'loop' is used outside a loop.");
    if (expression.name == "cycle" || expression.name == "changed")
      return scope->loop->call(run_, expression.name, evaluate_from(expression, 0));
    return scope->loop->attribute(run_, expression.name);
  }

  Value evaluate_item(const Expression& expression) {
    const Value value = evaluate(*expression.operands[0]);
    return get_item(run_, value, evaluate(*expression.operands[1]));
  }

  Value evaluate_slice(const Expression& expression) {
    const auto part = [&](size_t i) {
      return expression.operands[i] ? evaluate(*expression.operands[i]) : Value(None{});
    };
    const Value value = part(0), start = part(1), stop = part(2), step = part(3);
    return slice(run_, value, start, stop, step);
  }

  Arguments evaluate_arguments(const Expression& expression) {
    Arguments arguments{.values = evaluate_from(expression, 1), .named = {}};
    for (const auto& [name, value] : expression.named) arguments.named.emplace_back(name, evaluate(*value));
    return arguments;
  }

  Value evaluate_builtin(const Expression& expression) {
    const Value input = expression.operands[0] ? evaluate(*expression.operands[0]) : block_;
    const Arguments arguments = evaluate_arguments(expression);
    run_.stands_at(expression.line);
    return call(run_, *expression.builtin, input, arguments);
  }

  Value evaluate_call(const Expression& expression) {
    const Value callee = evaluate(*expression.operands[0]);
    const Arguments arguments = evaluate_arguments(expression);
    run_.stands_at(expression.line);
    if (callee.is<Undefined>()) run_.fail(*callee.as<Undefined>().why);
    if (!callee.is<CallablePointer>()) run_.fail(type_name(callee), " is called; only functions can be.");
    const Callable& callable = *callee.as<CallablePointer>();
    if (callable.macro != nullptr) return call_macro(*callable.macro, arguments);
    if (callable.builtin != nullptr) return call(run_, *callable.builtin, callable.self, arguments);
    return make_namespace(arguments);
  }

  Value make_namespace(const Arguments& arguments) {
    run_.charge_values(16);
    const Value initial = find_function("dict")->call_with_all(run_, None{}, arguments);
    Namespace& made = namespaces_.emplace_back();
    for (const auto& [key, value] : initial.dict()->items) {
      const std::string name = to_text(run_, key);
      if (name.starts_with('_'))
        run_.fail("a namespace has no attribute ", in_quotes(name), ": it begins with '_'.");
      made.attributes[name] = value;
    }
    return &made;
  }

  Value call_macro(const MacroStatement& macro, const Arguments& arguments) {
    const size_t count = macro.parameters.size();
    if (arguments.values.size() > count)
      run_.fail("the macro '", macro.name, "' is given ", arguments.values.size(), " arguments, and takes ",
                count, ".");
    // What was defined where the macro is: outside all blocks.
    Scope scope{.parent = &root_};
    std::vector<bool> given(count);
    for (size_t i = 0; i < count; ++i) {
      given[i] = i < arguments.values.size();
      scope.variables[macro.parameters[i]] =
          given[i] ? arguments.values[i]
                   : Value::undefined(
                         detail::concat("the parameter '", macro.parameters[i], "' was not provided."));
    }
    for (const auto& [name, value] : arguments.named) {
      const auto place = std::ranges::find(macro.parameters, name);
      const auto i = static_cast<size_t>(place - macro.parameters.begin());
      if (place == macro.parameters.end() || given[i])
        run_.fail("the macro '", macro.name, "' has no parameter ", in_quotes(name),
                  ", or is given it twice.");
      scope.variables[name] = value;
      given[i] = true;
    }
    const Inside inside(*this, scope);
    const size_t first_default = count - macro.defaults.size();
    for (size_t i = first_default; i < count; ++i)
      if (!given[i]) scope.variables[macro.parameters[i]] = evaluate(*macro.defaults[i - first_default]);
    std::string outer = std::exchange(output_, "");
    execute(macro.body);
    return Value::text(std::exchange(output_, std::move(outer)));
  }

  Run& run_;
  Scope root_;
  Scope* scope_ = &root_;
  std::string output_;
  Value block_ = None{};  // what a filter without an operand filters
  std::deque<Namespace> namespaces_;
};

}  // namespace

Template::Template(std::string_view source, std::string where)
    : where_(std::move(where)), block_(parse(source, where_)) {}

std::string Template::render(Run& run, const Variables& variables) const {
  return Renderer(run, variables).render(block_);
}

}  // namespace halfstep::jinja
