// Defines the entries of an op whose arguments have a list of fields (base/fields.h), and the table from
// which PyTorch's operators are made.
#pragma once

#include <new>
#include <vector>

#include "tigon/base/aligned_rows.h"
#include "tigon/base/fields.h"
#include "tigon/base/require.h"

namespace tigon {

// Runs the standard checks field by field.
class FieldChecks final : public Fields {
 public:
  FieldChecks(const char* op, const Context& ctx) : Fields(op, ctx.device() == Device::cuda), op_(op) {}
  void statistics(const char* name, std::initializer_list<Statistic> list, int64_t size, Role role) override;
  void result_over(const char* name, Matrix& m, const char*, const Matrix& input, Role role,
                   const char*) override;
  void list(const char* name, std::span<const Vector>& list, const Listed& each) override;
  // True if any wanted result has elements.
  bool work() const { return work_; }

 protected:
  void field(const Field& f) override;

 private:
  void vector(const Field& f);
  const char* op_;
  bool work_ = false;
};

// Holds the arguments of an op, without their type, and makes the call.
class AnyArgs {
 public:
  virtual ~AnyArgs() = default;
  virtual void fields(Fields& f) = 0;
  virtual void run(Context& ctx) const = 0;
};
// No op's arguments are larger.
inline constexpr size_t kArgsBytes = 2048;
template <class Args, void (*entry)(Context&, const Args&)>
class ArgsOf final : public AnyArgs {
 public:
  void fields(Fields& f) override { args_.fields(f); }
  void run(Context& ctx) const override { entry(ctx, args_); }

 private:
  Args args_;
};

// `none` is an operator with just that name.
enum class Direction : int8_t { forward, backward, none };

// Describes an op to PyTorch. The table is complete before PyTorch's own registrations run.
struct Operator {
  const char* op;  // without _fwd or _bwd
  Direction direction;
  AnyArgs* (*make)(void* memory);
};
std::vector<Operator>& operators();

template <class Args, void (*entry)(Context&, const Args&) = Args::run>
struct AddOperator {
  AddOperator(const char* op, Direction direction) {
    using Any = ArgsOf<Args, entry>;
    static_assert(sizeof(Any) <= kArgsBytes);
    operators().push_back({op, direction, [](void* memory) -> AnyArgs* { return new (memory) Any; }});
  }
};

template <class Args>
Args checked(const char* op, const Context& ctx, const Args& args) {
  Args a = args;
  FieldChecks checks(op, ctx);
  a.fields(checks);
  return a;
}
// Checks `args`, and runs the backend of the context's device if there is any work.
template <class Args, class OnCpu, class OnCuda>
void run_op(const char* op, Context& ctx, const Args& args, const OnCpu& on_cpu, const OnCuda& on_cuda) {
  Args a = args;
  FieldChecks checks(op, ctx);
  a.fields(checks);
  if (!checks.work()) return;
  AlignedRows rows(ctx);
  if (ctx.deterministic) a.fields(rows);
  on_device(op, ctx, [&] { on_cpu(ctx, a); }, [&] { on_cuda(ctx, a); });
  rows.finish();
}

}  // namespace tigon

#if TIGON_WITH_CUDA
#define TIGON_CUDA_ENTRY(entry) cuda::entry
#else
#define TIGON_CUDA_ENTRY(entry) [](auto&&...) {}
#endif

// Adds a PyTorch operator for an entry that is already defined.
#define TIGON_OPERATOR(entry, Args, op, direction)                                       \
  [[gnu::init_priority(200)]] static const AddOperator<Args, entry> entry##_operator(op, \
                                                                                     Direction::direction);
// Adds one for arguments that have their entry as a member, Args::run.
#define TIGON_CALL(Args, op, direction) \
  [[gnu::init_priority(200)]] static const AddOperator<Args> Args##_operator(op, Direction::direction);
// Defines the entry tigon::<entry> with its checks, and its PyTorch operator.
#define TIGON_DEFINE_ENTRY(entry, Args, op, name, direction)                                             \
  void entry(Context& ctx, const Args& a) { run_op(name, ctx, a, cpu::entry, TIGON_CUDA_ENTRY(entry)); } \
  TIGON_OPERATOR(entry, Args, op, direction)
// Defines a whole op, in namespace tigon: TIGON_OP(rms_norm, RmsNorm).
#define TIGON_OP(op, Args)                                   \
  TIGON_DEFINE_ENTRY(op##_fwd, Args##Fwd, #op, #op, forward) \
  TIGON_DEFINE_ENTRY(op##_bwd, Args##Bwd, #op, #op "_bwd", backward)
