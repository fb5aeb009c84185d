// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Runs a fuzz target over files and folders, for compilers without libFuzzer.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "bytes.hpp"

namespace {

int runs = 0;

void run(const std::filesystem::path &path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // A copy of exactly that size, so that reading past the input is an error.
  std::vector<uint8_t> input(text.begin(), text.end());
  std::printf("%s\n", path.c_str());
  std::fflush(stdout);
  LLVMFuzzerTestOneInput(input.data(), input.size());
  ++runs;
}

}  // namespace

int main(int argc, char **argv) {
  for (int i = 1; i < argc; ++i) {
    const std::filesystem::path path = argv[i];
    if (!std::filesystem::is_directory(path)) {
      run(path);
      continue;
    }
    for (const auto &entry : std::filesystem::directory_iterator(path)) run(entry.path());
  }
  std::printf("%d inputs\n", runs);
  return runs > 0 ? 0 : 1;
}
