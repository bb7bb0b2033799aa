#include "mega_moe/clock_probe.h"

#include "host/launch.h"
#include "host/make_status.h"

namespace mega_moe {

Status launch_clock_probe(const ClockProbeProblem& problem) noexcept {
    DeviceFacts facts{};
    const Variant* variant = nullptr;
    const Status status = prepare_launch({Op::kClockProbe}, problem.device, facts, variant);
    if (!status.ok) return status;
    if (problem.num_rows != facts.num_sms) {
        return error_status("out: shape is [%lld, 3], must be [%d, 3], one row per SM",
                            static_cast<long long>(problem.num_rows), facts.num_sms);
    }
    std::int64_t* out = problem.out;
    return launch_variant(*variant, variant->facts(), static_cast<unsigned>(facts.num_sms),
                          facts.max_shared_bytes, &out, problem.stream);
}

}  // namespace mega_moe
