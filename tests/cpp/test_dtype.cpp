// Dtypes by name, and their sizes.
#include "check.h"
#include "fibc/dtype.h"

using namespace fibc;

static_assert(dtype_of("bfloat16") == DType{4, 16, 1});
static_assert(dtype_of("float32") != dtype_of("int32"));
static_assert(dtype_of("float3").bits == 0);
static_assert(dtype_of("float32x").bits == 0);
static_assert(dtype_of("float4_e2m1").size_bytes() == 1);
static_assert(dtype_of("bool").size_bytes() == 1);
static_assert(dtype_of("int64").size_bytes() == 8);

int main() {
  for (const NamedDType& entry : kDTypes) CHECK(dtype_of(entry.name) == entry.dtype);
  return fibc_tests::failures != 0;
}
