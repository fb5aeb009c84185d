// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

#include "core/plugin_loader.hpp"

#include <dlfcn.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "common/error.hpp"

namespace xent {
namespace {

bool exists(const std::string &path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

void append_unique(std::vector<std::string> *folders, std::string folder) {
  for (const std::string &known : *folders) {
    if (known == folder) return;
  }
  folders->push_back(std::move(folder));
}

// The folders of XENT_PLUGIN_PATH. Relative ones, and the empty one that shells read as ".", would search the
// current directory; set-uid programs have no XENT_PLUGIN_PATH.
void append_configured(std::vector<std::string> *folders) {
  const char *value = secure_getenv("XENT_PLUGIN_PATH");
  if (value == nullptr) return;
  const std::string list = value;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(':', begin), list.size());
    if (list[begin] == '/') append_unique(folders, list.substr(begin, end - begin));
    begin = end + 1;
  }
}

// The folders beside libxent.so: as the dynamic linker found it, then where its links lead. xent/ is where plugins are
// installed; a build tree has each in a folder of its own name.
void append_installed(std::vector<std::string> *folders, const std::string &name) {
  static const char anchor = 0;
  Dl_info info;
  if (dladdr(&anchor, &info) == 0 || info.dli_fname == nullptr) return;
  char *resolved = realpath(info.dli_fname, nullptr);
  for (const char *file : {info.dli_fname, const_cast<const char *>(resolved)}) {
    if (file == nullptr || file[0] != '/') continue;
    const std::string folder(file, std::strrchr(file, '/'));
    append_unique(folders, folder + "/xent");
    append_unique(folders, folder + "/" + name);
  }
  std::free(resolved);
}

std::string join(const std::vector<std::string> &folders, size_t count) {
  std::string out;
  for (size_t i = 0; i < count; ++i) out += (i == 0 ? "" : ", ") + folders[i];
  return out.empty() ? "no folder" : out;
}

// Never RTLD_DEEPBIND, which gives a plugin a second libstdc++ state; never dlclose: drivers and thread-local
// destructors still point into a plugin at exit.
xent_status load_file(xent_context *ctx, const char *prefix, const char *file, xent_error *err) {
  dlerror();
  void *handle = dlopen(file, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char *reason = dlerror();
    return fail(err, XENT_PLUGIN_ERROR, "%s: %s cannot be loaded: %s", prefix, file,
                reason ? reason : "unknown reason");
  }
  void *symbol = dlsym(handle, XENT_PLUGIN_ENTRY_NAME);
  if (symbol == nullptr) {
    return fail(err, XENT_PLUGIN_ERROR, "%s: %s: exports no %s: no plugin for this version of libxent", prefix, file,
                XENT_PLUGIN_ENTRY_NAME);
  }
  return ctx->add_backend(prefix, reinterpret_cast<xent_plugin_entry_fn>(symbol), file, err);
}

xent_status load_name(xent_context *ctx, const char *prefix, const std::string &name, xent_error *err) {
  for (const char c : name) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (letter || c == '_' || c == '-' || c == '.') continue;
    return fail(err, XENT_INVALID_ARGUMENT, "%s: path: '%s' is neither a file (no '/') nor a backend's name", prefix,
                name.c_str());
  }
  const std::string file = "libxent_" + name + ".so";
  std::vector<std::string> folders;
  append_configured(&folders);
  append_installed(&folders, name);
  for (size_t i = 0; i < folders.size(); ++i) {
    const std::string path = folders[i] + "/" + file;
    if (!exists(path)) continue;
    if (i == 0) return load_file(ctx, prefix, path.c_str(), err);
    PluginError reason;
    const xent_status status = load_file(ctx, prefix, path.c_str(), &reason.error);
    if (status == XENT_OK) return XENT_OK;
    return fail_native(err, status, reason.error.native_code, "%s; not found in %s", reason.message(),
                       join(folders, i).c_str());
  }
  return fail(err, XENT_PLUGIN_ERROR, "%s: %s was not found in %s", prefix, file.c_str(),
              join(folders, folders.size()).c_str());
}

}  // namespace

xent_status load_backend(xent_context *ctx, const char *prefix, const char *path, xent_error *err) {
  if (path == nullptr || path[0] == '\0') {
    return fail(err, XENT_INVALID_ARGUMENT, "%s: path: is %s", prefix, path == nullptr ? "NULL" : "empty");
  }
  const std::lock_guard<std::recursive_mutex> lock(ctx->load_mutex());
  if (std::strchr(path, '/') != nullptr) return load_file(ctx, prefix, path, err);
  return load_name(ctx, prefix, path, err);
}

}  // namespace xent
