// CHECK(condition): says which one does not hold, and makes the test's exit status 1.
#ifndef FIBC_TESTS_CHECK_H
#define FIBC_TESTS_CHECK_H

#include <cstdio>

namespace fibc_tests {
inline int failures = 0;
}

#define CHECK(...)                                                              \
  do {                                                                          \
    if (!(__VA_ARGS__)) {                                                       \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
      ++fibc_tests::failures;                                                   \
    }                                                                           \
  } while (false)

#endif
