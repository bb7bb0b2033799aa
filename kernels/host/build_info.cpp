#include "mega_moe/build_info.h"

#include "host/build_json.inc"

namespace mega_moe {

const char* build_info() noexcept {
    return kBuildJson;
}

}  // namespace mega_moe
