// Names what Python fills and reads by name: the members of LossHeadSizes and LossHeadPlan, and the bits
// of `needs`.
#include <string>

#include "tigon/ops/loss_head/fields.h"

namespace tigon {
namespace {

template <class T>
struct Member {
  const char* name;
  int64_t T::* at;
};

#define TIGON_SIZE(name) {#name, &LossHeadSizes::name}
constexpr Member<LossHeadSizes> kSizes[] = {
    TIGON_SIZE(cuda),         TIGON_SIZE(dtype),        TIGON_SIZE(weight_dtype), TIGON_SIZE(rows),
    TIGON_SIZE(worked),       TIGON_SIZE(hidden),       TIGON_SIZE(vocab),        TIGON_SIZE(lora_rank),
    TIGON_SIZE(train_hidden), TIGON_SIZE(train_weight), TIGON_SIZE(train_bias),   TIGON_SIZE(main_grad),
    TIGON_SIZE(wide),         TIGON_SIZE(chunk_rows),   TIGON_SIZE(cap),          TIGON_SIZE(per_row),
    TIGON_SIZE(keep_rows),    TIGON_SIZE(unit),         TIGON_SIZE(copies),       TIGON_SIZE(row),
    TIGON_SIZE(fixed),        TIGON_SIZE(peak),         TIGON_SIZE(classes),      TIGON_SIZE(by_classes),
    TIGON_SIZE(kept_rows),    TIGON_SIZE(lean),         TIGON_SIZE(sums)};
#define TIGON_PLAN(name) {#name, &LossHeadPlan::name}
constexpr Member<LossHeadPlan> kPlan[] = {
    TIGON_PLAN(chunk_rows), TIGON_PLAN(whole_rows), TIGON_PLAN(kept),  TIGON_PLAN(unit),
    TIGON_PLAN(fits),       TIGON_PLAN(row),        TIGON_PLAN(fixed), TIGON_PLAN(workspace),
    TIGON_PLAN(gradients),  TIGON_PLAN(results),    TIGON_PLAN(peak),  TIGON_PLAN(capped),
    TIGON_PLAN(by_classes), TIGON_PLAN(kept_rows),  TIGON_PLAN(least)};

// Returns "name=default" of every member, in the order of memory.
template <class T, size_t count>
std::string text(const Member<T> (&members)[count]) {
  static_assert(sizeof(T) == count * sizeof(int64_t), "every member has a name");
  const T defaults;
  std::string found[count], all;
  for (const Member<T>& m : members) {
    const int64_t& value = defaults.*m.at;
    found[&value - reinterpret_cast<const int64_t*>(&defaults)] = m.name + ("=" + std::to_string(value));
  }
  for (const std::string& one : found) all += one + " ";
  return all;
}

#define TIGON_NEED(name, bit) #name "=" + std::to_string(LossHeadFields::bit) + " "
std::string needs() {
  return std::string() + TIGON_NEED(hidden, need_hidden) + TIGON_NEED(weight, need_weight) +
         TIGON_NEED(bias, need_bias) + TIGON_NEED(lora_a, need_lora_a) + TIGON_NEED(lora_b, need_lora_b) +
         TIGON_NEED(may_round, may_round) + TIGON_NEED(unit, need_unit) +
         TIGON_NEED(main_grad, into_main_grad) + TIGON_NEED(logits, keep_logits) +
         TIGON_NEED(by_classes, by_classes);
}

}  // namespace
}  // namespace tigon

extern "C" {
TIGON_API const char* tigon_loss_head_size_names() {
  static const std::string names = tigon::text(tigon::kSizes);
  return names.c_str();
}
TIGON_API const char* tigon_loss_head_plan_names() {
  static const std::string names = tigon::text(tigon::kPlan);
  return names.c_str();
}
TIGON_API const char* tigon_loss_head_needs() {
  static const std::string names = tigon::needs();
  return names.c_str();
}
}
