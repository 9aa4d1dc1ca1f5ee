#include <gtest/gtest.h>
#include <halfstep/error.h>
#include <halfstep/text_files.h>
#include <zlib.h>

#include "support/error_of.h"
#include "support/scratch.h"

namespace halfstep {
namespace {

using halfstep::testing::error_of;
using halfstep::testing::ScratchFolder;
using halfstep::testing::write_text;
using Path = std::filesystem::path;

void write_gzip(const Path& path, const std::string& text) {
  const gzFile file = gzopen(path.c_str(), "wb");
  ASSERT_NE(file, nullptr);
  gzwrite(file, text.data(), static_cast<unsigned>(text.size()));
  gzclose(file);
}

std::string all_of(const TextFile& file) {
  std::string text;
  for (const TextPart& part : file.parts) read_text(file, part, [&](std::string_view read) { text += read; });
  return text;
}

TEST(Records, AreWhatTheirFieldsSay) {
  EXPECT_EQ(read_record(R"({"text": "abc", "id": 7})", {}).text, "abc");
  EXPECT_EQ(read_record(R"({"body": "abc", "text": 7})", "body").text, "abc");
  EXPECT_EQ(read_record(R"({"body": "abc", "messages": []})", "body").kind, RecordKind::Text);
  const TextRecord asked = read_record(R"({"prompt": "", "completion": "b", "text": "c"})", {});
  EXPECT_EQ(asked.kind, RecordKind::Prompt);
  EXPECT_EQ(asked.completion, "b");
  const TextRecord talk = read_record(
      R"({"prompt": "x", "messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": ""}]})",
      {});
  EXPECT_EQ(talk.kind, RecordKind::Messages);
  EXPECT_EQ(talk.messages.at(0).content, "\u00e9");
}

TEST(Records, ThatAreNoneAreRefusedByWhatIsMissing) {
  const auto said = [](const char* line, std::optional<std::string> field = {}) {
    return error_of([&] { (void)read_record(line, field); });
  };
  EXPECT_NE(said(R"({"instruction": "a", "output": "b"})").find("'instruction', 'output'"),
            std::string::npos);
  EXPECT_NE(said(R"({"text": 7})").find("is not text"), std::string::npos);
  EXPECT_NE(said(R"({"text": "a"})", "body").find("'body' is missing"), std::string::npos);
  EXPECT_NE(said(R"(["text"])").find("not a JSON object"), std::string::npos);
  EXPECT_NE(said(R"({"text": "a)").find("JSON"), std::string::npos);
  EXPECT_NE(said(R"({"prompt": "a", "completion": ""})").find("nothing to learn"), std::string::npos);
  EXPECT_NE(said(R"({"messages": []})").find("not a list"), std::string::npos);
  EXPECT_NE(said(R"({"messages": [{"role": "user", "content": "a"}]})").find("nothing to learn"),
            std::string::npos);
  EXPECT_NE(said(R"({"messages": [{"role": "user", "content": ["a"]}]})").find("message 1"),
            std::string::npos);
  EXPECT_NE(said(std::string(R"({"text": "a", "b": )").append(100, '[').c_str()).find("JSON"),
            std::string::npos);
}

TEST(Records, FieldsThatWouldBeLostAreRefusedByName) {
  const auto said = [](const std::string& of_message, const std::string& of_record = "") {
    const std::string line =
        R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b")" +
        of_message + "}]" + of_record + "}";
    return error_of([&] { (void)read_record(line, {}); });
  };
  EXPECT_TRUE(said(R"(, "tool_calls": [{"type": "function"}])")
                  .starts_with("message 2: 'tool_calls' is not supported and would be lost. Remove"));
  for (const char* field :
       {R"("function_call": {"name": "f"})", R"("reasoning_content": "x")", R"("weight": 0)"})
    EXPECT_NE(said(std::string(", ") + field).find("would be lost"), std::string::npos) << field;
  EXPECT_TRUE(said("", R"(, "tools": [{"type": "function"}])").starts_with("'tools' is not supported"));
  const auto is_read = [](const std::string& field) {
    const std::string line =
        R"({"messages": [{"role": "assistant", "content": "b", )" + field + R"(}], "tools": null})";
    return read_record(line, {}).messages.size() == 1;
  };
  for (const char* field : {R"("tool_calls": null)", R"("tool_calls": [])", R"("weight": 1)", R"("id": 3)"})
    EXPECT_TRUE(is_read(field)) << field;
}

TEST(Records, ContentThatIsNoTextIsRefusedWithARemedy) {
  const auto said = [](const std::string& content) {
    const std::string line = R"({"messages": [{"role": "assistant", "content": )" + content + "}]}";
    return error_of([&] { (void)read_record(line, {}); });
  };
  EXPECT_NE(said(R"([{"type": "text", "text": "a"}])").find("message 1: 'content' is a list. Join"),
            std::string::npos);
  EXPECT_NE(said("null").find("'content' is null. Write"), std::string::npos);
}

TEST(TextFiles, FaultOfJsonHasTheLineOfTheFileAndTheColumn) {
  const ScratchFolder folder;
  write_text(folder / "a.jsonl", "{\"text\": \"one\"}\n{\"text\": \"two\"},\n");
  const std::string error = error_of([&] { look_at_text(folder / "a.jsonl", {}); });
  EXPECT_NE(error.find("a.jsonl, line 2: "), std::string::npos) << error;
  EXPECT_NE(error.find("column 16"), std::string::npos) << error;
  EXPECT_EQ(error.find("line 1"), std::string::npos) << error;
}

TEST(TextFiles, LinesArePartsAndTheFirstBadOneIsNamed) {
  const ScratchFolder folder;
  const Path path = folder / "a.jsonl";
  write_text(path, "{\"text\": \"one\"}\n\n  \r\n{\"text\": \"two\"}\r\n{\"text\": \"three\"}");
  const TextFile file = look_at_text(path, {});
  ASSERT_EQ(file.parts.size(), 3U);
  EXPECT_EQ(file.parts[1].line, 4);
  EXPECT_EQ(read_record(file, file.parts[1], {}).text, "two");
  EXPECT_EQ(read_record(file, file.parts[2], {}).text, "three");
  write_text(path, "{\"text\": \"one\"}\n{\"text\": 2}\n{\"txt\": 3}\n");
  EXPECT_NE(error_of([&] { look_at_text(path, {}); }).find("a.jsonl, line 2: "), std::string::npos);
  write_text(path, "{\"text\": \"one\"}\n{\"prompt\": \"a\", \"completion\": \"b\"}\n");
  const std::string mixed = error_of([&] { look_at_text(path, {}); });
  EXPECT_NE(mixed.find("line 2: holds a prompt and a completion"), std::string::npos) << mixed;
  write_text(path, "");
  EXPECT_TRUE(look_at_text(path, {}).parts.empty());
}

// Lines that end at, before and behind the end of what is read at once.
TEST(TextFiles, LinesAcrossReadsAreWhole) {
  const ScratchFolder folder;
  for (const int more : {-1, 0, 1, 2}) {
    const std::string first = R"({"text": ")" + std::string((1 << 20) - 12 + more, 'x') + R"("})";
    write_text(folder / "a.jsonl", first + "\n{\"text\": \"end\"}\n");
    const TextFile file = look_at_text(folder / "a.jsonl", {});
    ASSERT_EQ(file.parts.size(), 2U);
    EXPECT_EQ(file.parts[0].size(), first.size());
    EXPECT_EQ(read_record(file, file.parts[1], {}).text, "end");
  }
}

TEST(TextFiles, CompressedOnesAreUnpackedAndACutOneIsTold) {
  const ScratchFolder folder;
  std::string text;
  for (int i = 0; i < 200'000; ++i) text += std::to_string(i * 7919) + "\n";
  write_gzip(folder / "a.txt.gz", text);
  const TextFileOptions options{.unpack_to = folder / "unpacked/0"};
  const TextFile file = look_at_text(folder / "a.txt.gz", options);
  EXPECT_EQ(all_of(file), text);
  EXPECT_EQ(file.name, (folder / "a.txt.gz").string());
  write_gzip(folder / "a.jsonl.gz", "{\"text\": \"one\"}\n{}\n");
  EXPECT_NE(error_of([&] { look_at_text(folder / "a.jsonl.gz", options); }).find("a.jsonl.gz, line 2: "),
            std::string::npos);
  std::filesystem::resize_file(folder / "a.txt.gz", std::filesystem::file_size(folder / "a.txt.gz") - 20);
  EXPECT_NE(error_of([&] { look_at_text(folder / "a.txt.gz", options); }).find("cannot be unpacked"),
            std::string::npos);
}

TEST(TextFiles, WhatIsNoTextIsRefused) {
  const ScratchFolder folder;
  write_text(folder / "a.png", std::string("\x89PNG\0\0", 6));
  EXPECT_NE(error_of([&] { look_at_text(folder / "a.png", {}); }).find("its byte 4 is 0"), std::string::npos);
  write_gzip(folder / "a.tar.gz", std::string("a\0\0", 3));
  EXPECT_NE(
      error_of([&] { look_at_text(folder / "a.tar.gz", {.unpack_to = folder / "0"}); }).find("not text"),
      std::string::npos);
  EXPECT_THROW(look_at_text(folder / "none.txt", {}), FileError);
}

}  // namespace
}  // namespace halfstep
