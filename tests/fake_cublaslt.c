/* A cuBLASLt that multiplies nothing: it writes a line for every call, refuses what it is told to, and has as many
 * algorithms as it is asked for. Beside it a driver that has one context. Compiled by tests/fake_cublaslt.py. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char log_text[1 << 20];
static size_t log_length;

static void say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  log_length += (size_t)vsnprintf(log_text + log_length, sizeof log_text - log_length, format, arguments);
  va_end(arguments);
}

static long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text == NULL ? otherwise : atol(text);
}

typedef struct {
  uint64_t data[8];
} layout_t;

typedef struct {
  uint64_t data[8];
} algo_t;

typedef struct {
  algo_t algo;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
} result_t;

const char* fake_log(void) { return log_text; }

size_t cublasLtGetVersion(void) { return (size_t)setting("FAKE_VERSION", 130002); }

int cublasLtCreate(void** handle) {
  static char handles[64];
  static int num_handles;
  *handle = &handles[num_handles++];
  say("create\n");
  return (int)setting("FAKE_CREATE", 0);
}

int cublasLtDestroy(void* handle) {
  (void)handle;
  say("destroy\n");
  return 0;
}

int cublasLtMatmulDescCreate(void** desc, int compute, int scale) {
  static char descs[64];
  static int num_descs;
  *desc = &descs[num_descs++];
  say("desc compute=%d scale=%d\n", compute, scale);
  return 0;
}

int cublasLtMatmulDescDestroy(void* desc) {
  (void)desc;
  return 0;
}

int cublasLtMatmulDescSetAttribute(void* desc, int attribute, const void* value, size_t bytes) {
  (void)desc;
  say("desc_set attribute=%d value=%d bytes=%zu\n", attribute, *(const int32_t*)value, bytes);
  return 0;
}

int cublasLtMatrixLayoutInit_internal(layout_t* layout, size_t bytes, int type, uint64_t rows, uint64_t columns,
                                      int64_t stride) {
  if (bytes < sizeof *layout) return 3;
  layout->data[0] = (uint64_t)type;
  layout->data[1] = rows;
  layout->data[2] = columns;
  layout->data[3] = (uint64_t)stride;
  return 0;
}

static void say_layout(const char* name, const layout_t* layout) {
  say(" %s=%d/%dx%d/%d", name, (int)layout->data[0], (int)layout->data[1], (int)layout->data[2], (int)layout->data[3]);
}

static void say_algo(const algo_t* algo) {
  say(" algo=");
  for (size_t i = 0; i < sizeof *algo; ++i) say("%02x", ((const unsigned char*)algo)[i]);
}

int cublasLtMatmulAlgoCheck(void* handle, void* desc, const layout_t* a, const layout_t* b, const layout_t* c,
                            const layout_t* d, const algo_t* algo, result_t* result) {
  (void)handle;
  (void)desc;
  say("check");
  say_layout("a", a);
  say_layout("b", b);
  say_layout("c", c);
  say_layout("d", d);
  say_algo(algo);
  say("\n");
  if ((long)b->data[2] == setting("FAKE_REFUSED_M", -1)) return 15;
  result->workspace_bytes = (size_t)(setting("FAKE_ROW_WORKSPACE", 0) * (long)b->data[2]);
  return 0;
}

int cublasLtMatmul(void* handle, void* desc, const float* alpha, const void* a, const layout_t* a_layout, const void* b,
                   const layout_t* b_layout, const float* beta, const void* c, const layout_t* c_layout, void* d,
                   const layout_t* d_layout, const algo_t* algo, void* workspace, size_t workspace_bytes, void* stream) {
  (void)handle;
  (void)desc;
  say("matmul alpha=%g beta=%g a_at=%p b_at=%p c_at=%p d_at=%p", (double)*alpha, (double)*beta, a, b, c, d);
  say_layout("a", a_layout);
  say_layout("b", b_layout);
  say_layout("c", c_layout);
  say_layout("d", d_layout);
  say_algo(algo);
  say(" workspace=%p bytes=%zu stream=%p\n", workspace, workspace_bytes, stream);
  return (int)setting("FAKE_MATMUL", 0);
}

/* The heuristic: as many results as are asked for, each of another first byte; what it was told is in their bytes. */
static uint64_t preferences[16];

int cublasLtMatmulPreferenceCreate(void** preference) {
  *preference = preferences;
  return 0;
}

int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value, size_t bytes) {
  (void)preference;
  preferences[attribute] = 0;
  memcpy(&preferences[attribute], value, bytes);
  return 0;
}

int cublasLtMatmulAlgoGetHeuristic(void* handle, void* desc, const layout_t* a, const layout_t* b, const layout_t* c,
                                   const layout_t* d, void* preference, int num, result_t results[], int* found) {
  (void)handle;
  (void)desc;
  (void)preference;
  (void)c;
  (void)d;
  if ((long)b->data[2] == setting("FAKE_UNKNOWN_M", -1)) return 15;
  if (setting("FAKE_HEURISTIC", 0) != 0) return (int)setting("FAKE_HEURISTIC", 0);
  *found = num;
  for (int i = 0; i < num; ++i) {
    memset(&results[i], 0, sizeof results[i]);
    results[i].algo.data[0] = (uint64_t)(100 + i);
    results[i].algo.data[1] = a->data[1] | b->data[2] << 32;   /* k, m */
    results[i].algo.data[2] = preferences[1];                  /* the limit */
    results[i].algo.data[3] = preferences[3] | preferences[5] << 8 | preferences[8] << 32;
    results[i].workspace_bytes = preferences[1] == 0 ? 0 : 4096;
    results[i].waves = 0.5f;
    results[i].state = i == num - 1 ? 15 : 0;  /* the last one is none */
  }
  return 0;
}

int cublasLtMatmulAlgoConfigGetAttribute(const algo_t* algo, int attribute, void* value, size_t bytes, size_t* written) {
  const size_t size = attribute < 7 ? 4 : 2;
  if (bytes != size) return 7;
  memset(value, 0, bytes);
  *(unsigned char*)value = (unsigned char)(attribute == 0 ? algo->data[0] : 10 + (uint64_t)attribute);
  *written = size;
  return 0;
}

/* The driver. */
int cuInit(unsigned flags) {
  (void)flags;
  if (setting("FAKE_HANG", 0) != 0) {
    for (;;) {
    }
  }
  return (int)setting("FAKE_INIT", 0);
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  static char contexts[8];
  *context = &contexts[device];
  return 0;
}

int cuCtxSetCurrent(void* context) {
  (void)context;
  return 0;
}
