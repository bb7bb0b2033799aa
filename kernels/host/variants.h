#pragma once
#include "host/variant.h"

namespace mega_moe {

#include "host/variant_table.inc"

}  // namespace mega_moe
