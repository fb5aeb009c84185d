/* SPDX-FileCopyrightText: the libxent authors
 * SPDX-License-Identifier: Apache-2.0 */

/* xent/dlpack_util.h - from an exchanged DLPack tensor to the DLTensor that libxent takes.
 *
 * A DLTensor has no version and no flags, so what a versioned capsule says beyond it is checked
 * here: the major version, before anything else is read; read-only memory, which must not become an
 * output; padded sub-byte types. Nothing is consumed: the caller keeps the capsule alive until the
 * call that uses the tensor has returned, and calls its deleter afterwards.
 *
 *     const DLTensor *loss;
 *     if (xent_dlpack_borrow(managed, XENT_DLPACK_WRITE, "loss", &loss, &err) != XENT_OK) ...
 *
 * Needs a DLPack header of 1.0 or later.
 */
#ifndef XENT_DLPACK_UTIL_H
#define XENT_DLPACK_UTIL_H

#include <stdio.h>
#include <xent/xent.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { XENT_DLPACK_READ = 0, XENT_DLPACK_WRITE = 1 };

static inline xent_status xent_dlpack_refuse(xent_error *err, const char *argument, const char *reason) {
  if (err != NULL && err->struct_size >= sizeof(xent_error)) {
    err->status = XENT_INVALID_ARGUMENT;
    err->native_code = 0;
    snprintf(err->message, sizeof(err->message), "xent_dlpack_borrow: %s: %s", argument, reason);
  }
  return XENT_INVALID_ARGUMENT;
}

/* `argument` heads the message. `*out` lives as long as `managed` and is written on success only. */
static inline xent_status xent_dlpack_borrow(const struct DLManagedTensorVersioned *managed, int access,
                                             const char *argument, const DLTensor **out, xent_error *err) {
  const uint64_t read_only = 1u << 0;
  const uint64_t subbyte_padded = 1u << 2; /* younger than DLPack 1.0 */
  if (managed == NULL || out == NULL) return xent_dlpack_refuse(err, argument, "is NULL");
  if (managed->version.major != 1) {
    return xent_dlpack_refuse(err, argument, "its DLPack major version is not 1");
  }
  if (access == XENT_DLPACK_WRITE && (managed->flags & read_only) != 0) {
    return xent_dlpack_refuse(err, argument, "is read-only and cannot be an output");
  }
  if ((managed->flags & subbyte_padded) != 0) {
    return xent_dlpack_refuse(err, argument, "has a padded type of less than a byte");
  }
  *out = &managed->dl_tensor;
  return XENT_OK;
}

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* XENT_DLPACK_UTIL_H */
