#pragma once

namespace mega_moe {

// What a launch function returns. Plain data, so that nothing has to be thrown or freed across the boundary.
struct Status {
    bool ok;
    char message[256];  // empty when ok; else what was got and what was wanted
};

}  // namespace mega_moe
