#include "bench/groups.h"
#include "bench/launch/launch_parts.h"

namespace mega_moe::bench {

bool run_launch() {
    const bool barriers = measure_grid_barriers();
    return check_concurrent_launches() && barriers;
}

}  // namespace mega_moe::bench
