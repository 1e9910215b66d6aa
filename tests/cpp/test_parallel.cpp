// Every share runs once, whatever the runtime does: none, a full team, a smaller team, a forked child.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "check.h"
#include "fibc/parallel.h"

using namespace fibc;

namespace {

constexpr std::int32_t kMaxShares = 16;

struct Seen {
  std::atomic<int> runs[kMaxShares] = {};
  std::atomic<bool> wrong{false};
  std::int32_t expected = 0;
};

void count(void* context, std::int32_t thread, std::int32_t num_threads) {
  auto& seen = *static_cast<Seen*>(context);
  if (num_threads != seen.expected) seen.wrong = true;
  ++seen.runs[thread];
}

[[nodiscard]] bool every_share_runs_once(std::int32_t num_threads) {
  Seen seen;
  seen.expected = num_threads;
  parallel(count, &seen, num_threads);
  bool once = !seen.wrong;
  for (std::int32_t i = 0; i < kMaxShares; ++i) once &= seen.runs[i] == (i < num_threads ? 1 : 0);
  return once;
}

// A runtime like OpenMP's over std::thread, which may start a smaller team than asked.
thread_local int my_number = 0;
int team_limit = kMaxShares;
int team_size = 1;
int num_regions = 0;

void fake_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned) {
  ++num_regions;
  team_size = static_cast<int>(num_threads) < team_limit ? static_cast<int>(num_threads) : team_limit;
  std::vector<std::thread> team;
  for (int i = 0; i < team_size; ++i) {
    team.emplace_back([=] {
      my_number = i;
      body(data);
    });
  }
  for (std::thread& thread : team) thread.join();
}

}  // namespace

int main() {
  start_parallel(OpenMp{});
  CHECK(every_share_runs_once(1));
  CHECK(parallel_runtime().num_serial == 0);
  CHECK(every_share_runs_once(4));
  CHECK(parallel_runtime().num_serial == 1);  // said, not hidden

  OpenMp fake;
  fake.parallel = fake_parallel;
  fake.thread_num = [] { return my_number; };
  fake.num_threads = [] { return team_size; };
  parallel_runtime().openmp = fake;
  for (const int limit : {kMaxShares, 3, 1}) {
    team_limit = limit;
    for (const std::int32_t shares : {1, 2, 5, kMaxShares}) CHECK(every_share_runs_once(shares));
  }
  CHECK(num_regions == 9);  // one share needs no region

  CHECK(usable_threads(8) == 8);
  const pid_t child = fork();
  if (child == 0) {
    num_regions = 0;
    CHECK(usable_threads(8) == 1);
    CHECK(every_share_runs_once(5));
    CHECK(num_regions == 0);
    _exit(fibc_tests::failures != 0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  return fibc_tests::failures != 0;
}
