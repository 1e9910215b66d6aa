// The lookup as constant data: regions of one and of two features, ratios, and nothing where nothing is known.
#include "check.h"
#include "fibc/lookup.h"

using namespace fibc;

namespace {

constexpr Feature kOne[] = {{0, -1}};
constexpr Bound kFirst[] = {{1, 4}};
constexpr Bound kSecond[] = {{8, 8}};
constexpr Bound kThird[] = {{9, 1LL << 40}};
constexpr Region kLine[] = {{kFirst, 0, false}, {kSecond, 1, false}, {kThird, 0, true}};
constexpr Table kLineTable = {"", {}, kOne, kLine, {}, Target::kCpu, {}, {}, ""};

constexpr std::int32_t line(std::int64_t m) {
  const std::int64_t axes[] = {m};
  return find_region(kLineTable, axes);
}

static_assert(line(0) == kNoRegion && line(1) == 0 && line(4) == 0 && line(5) == kNoRegion && line(7) == kNoRegion);
static_assert(line(8) == 1 && line(9) == 2 && line(1LL << 40) == 2 && line((1LL << 40) + 1) == kNoRegion);

// Two features: M, and the ratio of K and M rounded up. Boxes that share their first bounds.
constexpr Feature kTwo[] = {{0, -1}, {1, 0}};
constexpr Bound kA[] = {{1, 4}, {1, 2}};
constexpr Bound kB[] = {{1, 4}, {5, 9}};
constexpr Bound kC[] = {{3, 3}, {3, 4}};
constexpr Bound kD[] = {{5, 6}, {1, 1}};
constexpr Region kBoxes[] = {{kA, 0, false}, {kB, 0, false}, {kC, 0, false}, {kD, 0, false}};
constexpr Table kBoxTable = {"", {}, kTwo, kBoxes, {}, Target::kCpu, {}, {}, ""};

constexpr std::int32_t box(std::int64_t m, std::int64_t k) {
  const std::int64_t axes[] = {m, k};
  return find_region(kBoxTable, axes);
}

static_assert(box(4, 8) == 0 && box(4, 9) == kNoRegion && box(4, 17) == 1 && box(4, 36) == 1 && box(4, 37) == kNoRegion);
static_assert(box(3, 9) == 2 && box(3, 12) == 2 && box(3, 6) == 0 && box(3, 13) == 1);
static_assert(box(5, 5) == 3 && box(5, 6) == kNoRegion && box(7, 7) == kNoRegion);
static_assert(box(0, 5) == kNoRegion);

constexpr std::int64_t ratio(std::int64_t top, std::int64_t bottom) {
  const std::int64_t axes[] = {top, bottom};
  return feature_value({0, 1}, axes);
}

static_assert(ratio(7, 0) == 0 && ratio(0, 7) == 0 && ratio(7, 7) == 1 && ratio(8, 7) == 2);
static_assert(ratio(INT64_MAX, 1) == INT64_MAX && ratio(INT64_MAX, 2) == INT64_MAX / 2 + 1);

constexpr Table kNothing = {"", {}, {}, {}, {}, Target::kCpu, {}, {}, ""};

}  // namespace

int main() {
  const std::int64_t axes[] = {1};
  CHECK(find_region(kNothing, axes) == kNoRegion);
  return fibc_tests::failures != 0;
}
