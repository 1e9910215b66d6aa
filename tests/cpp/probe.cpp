// The C++ dispatch over tables that tests make up at run time, for comparison with the Python oracle.
#include <cstdint>
#include <deque>
#include <vector>

#include "fibc/dispatch.h"

namespace {

// Reads a flat list of integers from front to back.
class Reader {
 public:
  explicit Reader(const std::int64_t* words) : next_(words) {}
  std::int64_t operator()() { return *next_++; }
  std::int32_t small() { return static_cast<std::int32_t>(*next_++); }

 private:
  const std::int64_t* next_;
};

constexpr const char* kIsaNames[] = {"avx2", "avx512", "avx512_bf16", "amx_bf16", "avx999"};

}  // namespace

// Decides one call. `words`: the table, then the call, in the order read below; sizes of lists come before them.
// Writes the axes' sizes to `axes` and the region's index to `region`; returns the reason's index.
extern "C" __attribute__((visibility("default"))) std::int32_t fibc_probe(const std::int64_t* words, std::int64_t* axes,
                                                                         std::int32_t* region) {
  using namespace fibc;
  Reader read(words);
  std::deque<std::vector<std::int32_t>> axis_lists;
  std::deque<std::vector<Bound>> bound_lists;
  std::deque<std::vector<TensorGuard>> guard_lists;
  std::vector<Axis> spec_axes(static_cast<std::size_t>(read()));
  for (Axis& axis : spec_axes) axis = {"axis", read()};
  const auto read_arguments = [&] {
    std::vector<Argument> arguments(static_cast<std::size_t>(read()));
    for (Argument& argument : arguments) {
      const auto kind = static_cast<Kind>(read());
      const DType dtype = kDTypes[read()].dtype;
      axis_lists.emplace_back(static_cast<std::size_t>(read()));
      for (std::int32_t& axis : axis_lists.back()) axis = read.small();
      argument = {"argument", kind, dtype, {axis_lists.back().data(), static_cast<std::int32_t>(axis_lists.back().size())},
                  false, kNoAlias};
    }
    return arguments;
  };
  const std::vector<Argument> inputs = read_arguments();
  const std::vector<Argument> outputs = read_arguments();
  std::vector<Feature> features(static_cast<std::size_t>(read()));
  for (Feature& feature : features) {
    feature.numerator = read.small();
    feature.denominator = read.small();
  }
  std::vector<Region> regions(static_cast<std::size_t>(read()));
  for (Region& item : regions) {
    bound_lists.emplace_back(features.size());
    for (Bound& bound : bound_lists.back()) {
      bound.first = read();
      bound.last = read();
    }
    item.bounds = {bound_lists.back().data(), static_cast<std::int32_t>(features.size())};
    item.variant = read.small();
    item.release_gil = false;
  }
  std::vector<Variant> variants(static_cast<std::size_t>(read()));
  for (Variant& variant : variants) {
    variant = {"variant", kIsaNames[read()], nullptr, {}, {}, 0, nullptr, nullptr};
    guard_lists.emplace_back(inputs.size());
    for (TensorGuard& guard : guard_lists.back()) {
      guard.layout = static_cast<Layout>(read());
      guard.alignment_bytes = read.small();
    }
    variant.inputs = {guard_lists.back().data(), static_cast<std::int32_t>(inputs.size())};
    variant.max_offset_elems = read();
  }
  const auto span = [](const auto& list) { return Span(list.data(), static_cast<std::int32_t>(list.size())); };
  const Table table{"probe", {"probe", span(spec_axes), span(inputs), span(outputs)}, span(features), span(regions),
                    span(variants), read() != 0 ? Target::kCuda : Target::kCpu, {}, {}, ""};

  Isa isa;
  isa.avx2 = read() != 0;
  isa.avx512 = read() != 0;
  Call call;
  std::deque<std::vector<std::int64_t>> sizes;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto rank = static_cast<std::size_t>(read());
    std::vector<std::int64_t>& shape = sizes.emplace_back(rank);
    std::vector<std::int64_t>& strides = sizes.emplace_back(rank);
    for (std::int64_t& size : shape) size = read();
    for (std::int64_t& stride : strides) stride = read();
    const std::int64_t dtype = read();
    call.input_facts[i].dtype = dtype < 0 ? DType{} : kDTypes[dtype].dtype;
    call.input_facts[i].rank = static_cast<std::int32_t>(rank);
    call.input_facts[i].place.type = read.small();
    call.input_facts[i].place.index = read.small();
    call.inputs[i] = {reinterpret_cast<void*>(read()), shape.data(), strides.data()};
  }
  const Choice choice = choose(table, isa, call);
  for (std::size_t i = 0; i < spec_axes.size(); ++i) axes[i] = call.axes[i];
  *region = choice.region;
  return static_cast<std::int32_t>(choice.reason);
}

extern "C" __attribute__((visibility("default"))) const char* fibc_probe_word(std::int32_t reason) {
  return fibc::text_of(static_cast<fibc::Reason>(reason)).word;
}
