#pragma once

namespace mega_moe::bench {

bool measure_grid_barriers();
bool check_concurrent_launches();

}  // namespace mega_moe::bench
