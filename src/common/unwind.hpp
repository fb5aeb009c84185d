// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// A callback may end its thread: pthread_exit and pthread_cancel unwind it through us, and Python does so to threads
// that still run as its interpreter ends. `catch (...)` gets that too; where it is not thrown on, libstdc++ aborts.
#pragma once

#include <exception>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

namespace xent {

#if defined(__GLIBCXX__)
using ThreadEnds = abi::__forced_unwind;
#else
class ThreadEnds {};  // other libraries unwind past handlers
#endif

}  // namespace xent
