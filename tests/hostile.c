/* Candidates for the tests of isolation: y = x + x for x [rows, 64] float32, and every way to get it wrong. */
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fibc/kernel_abi.h"

#define COLUMNS 64

static void doubled(const fibc_call* call, int64_t rows) {
  const float* x = call->inputs[0].data;
  float* y = call->outputs[0].data;
  for (int64_t i = 0; i < rows * COLUMNS; ++i) y[i] = x[i] + x[i];
}

#define CANDIDATE(name) __attribute__((visibility("default"))) int32_t name(const fibc_call* call)
#define ROWS (call->axes[0])

CANDIDATE(good) { doubled(call, ROWS); return 0; }
CANDIDATE(segfault) { (void)call; return *(volatile int32_t*)8; }
CANDIDATE(aborts) { (void)call; abort(); }
CANDIDATE(endless) { (void)call; for (;;) pause(); }
CANDIDATE(exits) { (void)call; _exit(3); }
CANDIDATE(greedy) {
  char* memory = malloc((size_t)100 << 30);
  if (memory == NULL) return 1;
  for (size_t i = 0; i < (size_t)100 << 30; i += 4096) memory[i] = 1;
  doubled(call, ROWS);
  free(memory);
  return 0;
}
CANDIDATE(zeros) { memset(call->outputs[0].data, 0, ROWS * COLUMNS * 4); return 0; }
CANDIDATE(copied) { memcpy(call->outputs[0].data, call->inputs[0].data, ROWS * COLUMNS * 4); return 0; }
CANDIDATE(half_written) { doubled(call, (ROWS + 1) / 2); return 0; }
CANDIDATE(stale) {
  static int calls = 0;
  if (calls++ == 0) doubled(call, ROWS);
  return 0;
}
CANDIDATE(past_the_end) {
  doubled(call, ROWS);
  ((float*)call->outputs[0].data)[ROWS * COLUMNS] = 0.5F;
  return 0;
}
CANDIDATE(before_the_start) {
  doubled(call, ROWS);
  ((char*)call->outputs[0].data)[-1] = 0;
  return 0;
}
CANDIDATE(changes_its_input) {
  doubled(call, ROWS);
  ((float*)call->inputs[0].data)[ROWS * COLUMNS - 1] = 0.5F;
  return 0;
}
CANDIDATE(non_deterministic) {
  static int32_t calls = 0;
  doubled(call, ROWS);
  if (calls++ % 2) {
    int32_t bits;
    float* y = call->outputs[0].data;
    memcpy(&bits, y, 4);
    if ((bits & 0x7f800000) != 0x7f800000) bits ^= 1;
    memcpy(y, &bits, 4);
  }
  return 0;
}
CANDIDATE(leaves_a_child) {
  if (fork() == 0) {
    setsid();
    if (fork() == 0) { setsid(); sleep(600); }
    sleep(600);
  }
  doubled(call, ROWS);
  return 0;
}
/* Passes validation; dies when it has been called a hundred times. */
CANDIDATE(dies_later) {
  static int calls = 0;
  if (++calls > 100) raise(SIGSEGV);
  doubled(call, ROWS);
  return 0;
}
CANDIDATE(wrong_later) {
  static int calls = 0;
  doubled(call, ROWS);
  if (++calls > 100) ((float*)call->outputs[0].data)[0] += 1.0F;
  return 0;
}
/* Dies in the first process that runs it, and never again: not its fault. */
CANDIDATE(unlucky) {
  const char* mark = getenv("FIBC_TEST_MARK");
  if (mark != NULL && access(mark, F_OK) != 0) {
    close(creat(mark, 0600));
    raise(SIGSEGV);
  }
  doubled(call, ROWS);
  return 0;
}

/* A GPU's context after an error that is reported late: whatever runs in this process fails from then on. */
__attribute__((visibility("default"))) int32_t context_lost = 0;

CANDIDATE(good_on_device) {
  if (context_lost) return 2;
  doubled(call, ROWS);
  return 0;
}
CANDIDATE(loses_context) { (void)call; context_lost = 1; return 2; }
CANDIDATE(loses_context_later) {
  static int32_t calls = 0;
  if (++calls > 300) context_lost = 1;
  if (context_lost) return 2;
  doubled(call, ROWS);
  return 0;
}
