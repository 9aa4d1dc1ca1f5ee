#include "checkpoint/disk_model.h"

#include <algorithm>
#include <fstream>
#include <stdexcept>

namespace halfstep::testing {

namespace fs = std::filesystem;
using shim::Event;

DiskModel::DiskModel(std::string root) : root_(std::move(root)) { nodes_.push_back({.folder = true}); }

DiskModel::Node& DiskModel::at(const std::string& path) {
  Id id = 0;
  for (const fs::path& name : fs::path(path).lexically_relative(root_)) {
    if (name == ".") continue;
    const auto found = nodes_[id].names.find(name);
    if (found == nodes_[id].names.end()) throw std::logic_error("no such path on the disk: " + path);
    id = found->second;
  }
  return nodes_[id];
}

std::pair<DiskModel::Node*, std::string> DiskModel::parent_of(const std::string& path) {
  return {&at(fs::path(path).parent_path()), fs::path(path).filename()};
}

void DiskModel::apply_to(Names& names, const NameChange& change) {
  if (!change.removed.empty()) names.erase(change.removed);
  if (!change.added.empty()) names[change.added] = change.id;
}

void DiskModel::change(Node& folder, NameChange change) {
  apply_to(folder.names, change);
  folder.unsynced.push_back(std::move(change));
}

void DiskModel::add(const std::string& path, bool folder) {
  nodes_.push_back({.folder = folder});
  const auto [parent, name] = parent_of(path);
  change(*parent, {.removed = "", .added = name, .id = static_cast<Id>(nodes_.size()) - 1});
}

void DiskModel::apply(const Event& event) {
  switch (event.kind) {
    case Event::Kind::Create:
      return add(event.path, false);
    case Event::Kind::Mkdir:
      return add(event.path, true);
    case Event::Kind::Write: {
      std::vector<std::byte>& now = at(event.path).now;
      now.resize(std::max<size_t>(now.size(), event.offset + event.bytes.size()));
      std::copy(event.bytes.begin(), event.bytes.end(), now.begin() + static_cast<ptrdiff_t>(event.offset));
      return;
    }
    case Event::Kind::Truncate:
      return at(event.path).now.resize(event.offset);
    case Event::Kind::SyncFile: {
      Node& file = at(event.path);
      file.synced = file.now;
      return;
    }
    case Event::Kind::SyncFolder: {
      Node& folder = at(event.path);
      folder.synced_names = folder.names;
      folder.unsynced.clear();
      return;
    }
    case Event::Kind::Rename: {
      const auto [from, old_name] = parent_of(event.path);
      const auto [to, new_name] = parent_of(event.to);
      if (from != to) throw std::logic_error("a rename across folders is not modelled: " + event.path);
      return change(*from, {.removed = old_name, .added = new_name, .id = from->names.at(old_name)});
    }
    case Event::Kind::Unlink:
    case Event::Kind::Rmdir: {
      const auto [parent, name] = parent_of(event.path);
      return change(*parent, {.removed = name, .added = "", .id = -1});
    }
    case Event::Kind::Saved:
      return;
  }
}

std::vector<std::byte> DiskModel::bytes_left(const Node& file, Survivors survivors,
                                             std::mt19937_64& random) const {
  if (survivors == Survivors::None || survivors == Survivors::Outer || file.now == file.synced)
    return file.synced;
  if (survivors == Survivors::All || survivors == Survivors::Bytes || survivors == Survivors::Inner)
    return file.now;
  std::vector<std::byte> left = file.synced;
  left.resize(file.now.size());
  if (survivors == Survivors::Names) return left;
  constexpr size_t kPage = 4096;
  for (size_t page = 0; page < left.size(); page += kPage) {
    const size_t end = std::min(page + kPage, left.size());
    if (random() % 2 == 0)
      std::copy(file.now.begin() + static_cast<ptrdiff_t>(page),
                file.now.begin() + static_cast<ptrdiff_t>(end), left.begin() + static_cast<ptrdiff_t>(page));
  }
  if (random() % 2 == 0)
    left.resize(file.synced.size() +
                random() % (left.size() - std::min(left.size(), file.synced.size()) + 1));
  return left;
}

bool DiskModel::survives(Survivors survivors, int depth, std::mt19937_64& random) {
  constexpr int kRunDepth = 1;  // the root holds the run's folder
  switch (survivors) {
    case Survivors::None:
    case Survivors::Bytes:
      return false;
    case Survivors::All:
    case Survivors::Names:
      return true;
    case Survivors::Inner:
      return depth > kRunDepth;
    case Survivors::Outer:
      return depth <= kRunDepth;
    case Survivors::Some:
      return random() % 2 == 0;
  }
  return false;
}

void DiskModel::write_out(Id id, Survivors survivors, std::mt19937_64& random, int depth,
                          const fs::path& into) const {
  const Node& node = nodes_[id];
  if (!node.folder) {
    const std::vector<std::byte> bytes = bytes_left(node, survivors, random);
    std::ofstream(into, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    return;
  }
  fs::create_directories(into);
  Names names = node.synced_names;
  for (const NameChange& change : node.unsynced)
    if (survives(survivors, depth, random)) apply_to(names, change);
  for (const auto& [name, child] : names) write_out(child, survivors, random, depth + 1, into / name);
}

void DiskModel::lose_power(Survivors survivors, uint64_t seed, const fs::path& into) const {
  std::mt19937_64 random(seed);
  write_out(0, survivors, random, 0, into);
}

}  // namespace halfstep::testing
