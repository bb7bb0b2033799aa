#include "mega_moe/clock_probe.h"

#include "binding/check.h"
#include "binding/ops.h"
#include "binding/stream.h"

namespace mega_moe::binding {

void clock_probe(const Tensor& out) {
    const Checker check("clock_probe");
    check.dims("out", out, 2);
    check.dtype("out", out, {ScalarType::Long});
    check.size("out", out, 1, 3);
    check.contiguous("out", out);
    check.cuda("out", out);
    const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
    ClockProbeProblem problem{};
    problem.out = static_cast<int64_t*>(out.mutable_data_ptr());
    problem.num_rows = out.size(0);
    problem.device = out.get_device_index();
    problem.stream = current_stream(problem.device);
    const Status status = launch_clock_probe(problem);
    if (!status.ok) check.fail(status.message);
}

}  // namespace mega_moe::binding
