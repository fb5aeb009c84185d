/* SPDX-FileCopyrightText: the libxent authors
 * SPDX-License-Identifier: Apache-2.0 */

/* What tools/bench_host.py compiles and calls: the host time of one call of xent_forward, without Python around it. */

#define _POSIX_C_SOURCE 199309L
#include <stddef.h>
#include <stdint.h>
#include <time.h>

typedef int32_t (*forward_fn)(const void *plan, const void *args, void *err); /* xent_forward, of <xent/xent.h> */

/* Where a call wanted its partials gathered. */
struct bench_host_gathered {
  void *send, *recv;
  size_t bytes;
};

/* all_gather of an xent_comm_desc: costs nothing, for what was gathered before is still there. */
int32_t bench_host_gather(void *user, const void *send, void *recv, size_t bytes, void *stream, void *err) {
  struct bench_host_gathered *at = user;
  (void)stream, (void)err;
  at->send = (void *)send;
  at->recv = recv;
  at->bytes = bytes;
  return 0;
}

/* Microseconds of one of `calls` calls, or less than 0 where one fails. */
double bench_host_forward(forward_fn forward, const void *plan, const void *args, int calls) {
  struct timespec start, end;
  int32_t failed = 0;
  clock_gettime(CLOCK_MONOTONIC, &start);
  for (int i = 0; i < calls; ++i) failed |= forward(plan, args, NULL);
  clock_gettime(CLOCK_MONOTONIC, &end);
  if (failed) return -1;
  return ((double)(end.tv_sec - start.tv_sec) * 1e9 + (double)(end.tv_nsec - start.tv_nsec)) * 1e-3 / calls;
}
