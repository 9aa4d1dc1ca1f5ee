// Jinja templates, as far as chat templates of published models use them.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "jinja/syntax.h"

namespace halfstep::jinja {

/// A template as Hugging Face's transformers sets up Jinja2: trim_blocks, lstrip_blocks, break and continue,
/// `raise_exception`, `strftime_now`, its own `tojson`, the tag `generation`.
///
/// What is not supported is refused by name when it is parsed. Rendering an untrusted template ends: steps,
/// nesting and the sizes of texts are bounded (run.h).
class Template {
 public:
  /// `where` begins the messages of errors.
  Template(std::string_view source, std::string where);

  using Variables = std::vector<std::pair<std::string, Value>>;
  /// `variables` are made for the run that they are rendered in.
  std::string render(Run& run, const Variables& variables) const;

  const std::string& where() const { return where_; }

 private:
  std::string where_;
  Block block_;
};

}  // namespace halfstep::jinja
