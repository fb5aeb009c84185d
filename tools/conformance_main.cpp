// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "conformance.hpp"

namespace {

using namespace xent_test;

constexpr char kUsage[] =
    "usage: conformance [--backend cpu|cuda|NAME] [--plugin PATH] [--seconds N | --problems N] [--seed S]\n"
    "                   [--ranks N,N,...]\n";

// What a crash leaves to say.
char last_words[96];
volatile std::sig_atomic_t words = 0;

extern "C" void on_crash(int signal) {
  const auto unused = write(2, last_words, static_cast<size_t>(words));
  static_cast<void>(unused);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

int usage(const char *complaint, const char *value) {
  std::fprintf(stderr, "conformance: %s%s\n%s", complaint, value, kUsage);
  return 2;
}

bool number(const char *text, uint64_t *out) {
  char *end = nullptr;
  *out = std::strtoull(text, &end, 0);
  return *text >= '0' && *text <= '9' && *end == '\0';
}

// "2,4" of numbers from 1 to 64.
bool numbers(std::string text, std::vector<int32_t> *out) {
  text += ',';
  for (size_t begin = 0, end; (end = text.find(',', begin)) != std::string::npos; begin = end + 1) {
    uint64_t n = 0;
    if (!number(text.substr(begin, end - begin).c_str(), &n) || n < 1 || n > 64) return false;
    out->push_back(static_cast<int32_t>(n));
  }
  return true;
}

}  // namespace

int main(int argc, char **argv) {
  std::string backend, plugin;
  conformance::Limits limits;
  std::random_device entropy;
  limits.seed = (uint64_t{entropy()} << 20) ^ entropy();
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "-h" || option == "--help") {
      std::printf("%s", kUsage);
      return 0;
    }
    if (i + 1 == argc) return usage("unknown, or lacks its value: ", argv[i]);
    const char *value = argv[++i];
    uint64_t n = 0;
    const bool is_number = number(value, &n);
    if (option == "--backend") {
      backend = value;
    } else if (option == "--plugin") {
      plugin = value;
    } else if (option == "--ranks") {
      if (!numbers(value, &limits.ranks)) return usage("no list of numbers from 1 to 64: ", value);
    } else if (!is_number) {
      return usage("no number, or an unknown option: ", value);
    } else if (option == "--seconds") {
      limits.seconds = static_cast<double>(n);
    } else if (option == "--problems") {
      limits.problems = static_cast<int64_t>(n);
    } else if (option == "--seed") {
      limits.seed = n;
    } else {
      return usage("unknown option ", option.c_str());
    }
  }
  if (backend.empty() && plugin.empty()) backend = "cpu";

  std::string why;
  const auto target = conformance::find_target(backend, plugin, &why);
  if (!target) {
    std::fprintf(stderr, "conformance: %s\n", why.c_str());
    return 2;
  }
  std::printf("backend %s on %s memory, seed %llu\n", target->name.c_str(), name_of(target->device),
              static_cast<unsigned long long>(limits.seed));
  std::fflush(stdout);
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) std::signal(signal, on_crash);
  conformance::Listener listener;
  listener.before = [](uint64_t seed) {
    words = std::snprintf(last_words, sizeof(last_words), "conformance: died in --seed %llu --problems 1\n",
                          static_cast<unsigned long long>(seed));
  };
  listener.progress = [](const std::string &line) { std::fprintf(stderr, "%s\n", line.c_str()); };
  listener.failure = [](const std::string &text) {
    std::printf("%s\n", text.c_str());
    std::fflush(stdout);
  };
  const conformance::Report report = conformance::campaign(*target, limits, listener);
  std::printf("%s", report.table().c_str());
  return report.passed() ? 0 : 1;
}
