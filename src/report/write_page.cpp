#include "report/report.h"

#include "io/durable_file.h"

namespace halfstep {

void write_page(const std::filesystem::path& path, std::string_view html) {
  files::write_durably(path, html);
}

}  // namespace halfstep
