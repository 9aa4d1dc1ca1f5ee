#include <halfstep/report.h>

#include "files/durable_file.h"

namespace halfstep {

void write_page(const std::filesystem::path& path, std::string_view html) {
  files::DurableFile file(path);
  file.write(std::as_bytes(std::span(html)));
  file.commit();
}

}  // namespace halfstep
