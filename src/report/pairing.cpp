#include "report/pairing.h"

#include "report/figures.h"

namespace halfstep::report {

std::string why_not_the_same_batches(const RunHistory& a, const RunHistory& b) {
  const auto first = configuration_of(a), second = configuration_of(b);
  if (!first || !second)
    return "a configuration cannot be read, so that nobody knows whether they saw the same batches";
  const auto& left = first->data;
  const auto& right = second->data;
  if (left.seed != right.seed) return "data.seed differs";
  if (left.train != right.train || left.images != right.images) return "they train on other files";
  if (left.validation != right.validation || left.validation_fraction != right.validation_fraction)
    return "other parts of the data are held out";
  if (left.sequence_length != right.sequence_length) return "data.sequence_length differs";
  if (left.batch_size * first->train.accumulation != right.batch_size * second->train.accumulation)
    return "their steps have batches of another size";
  // Without a tokenizer of its own a run takes that of the model which it starts from.
  const bool from_model = !left.tokenizer && !right.tokenizer;
  if (left.tokenizer != right.tokenizer || (from_model && first->model.from != second->model.from))
    return "their tokenizers differ";
  return "";
}

}  // namespace halfstep::report
