#pragma once

// Spelling of wgmma's accumulators in inline PTX, which numbers its operands: 32 registers for n64, 64 for
// n128, 128 for n256. The constraint is "+" for registers that are added to, "=" for ones that the
// instruction sets.
// clang-format off
#define MEGA_MOE_WGMMA_NAMES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MEGA_MOE_WGMMA_NAMES_64 MEGA_MOE_WGMMA_NAMES_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MEGA_MOE_WGMMA_NAMES_128 MEGA_MOE_WGMMA_NAMES_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define MEGA_MOE_WGMMA_LIST_4(C, d, i) C "f"(d[i]), C "f"(d[i + 1]), C "f"(d[i + 2]), C "f"(d[i + 3])
#define MEGA_MOE_WGMMA_LIST_16(C, d, i) \
    MEGA_MOE_WGMMA_LIST_4(C, d, i), MEGA_MOE_WGMMA_LIST_4(C, d, i + 4), \
    MEGA_MOE_WGMMA_LIST_4(C, d, i + 8), MEGA_MOE_WGMMA_LIST_4(C, d, i + 12)
#define MEGA_MOE_WGMMA_LIST_32(C, d) MEGA_MOE_WGMMA_LIST_16(C, d, 0), MEGA_MOE_WGMMA_LIST_16(C, d, 16)
#define MEGA_MOE_WGMMA_LIST_64(C, d) MEGA_MOE_WGMMA_LIST_32(C, d), \
    MEGA_MOE_WGMMA_LIST_16(C, d, 32), MEGA_MOE_WGMMA_LIST_16(C, d, 48)
#define MEGA_MOE_WGMMA_LIST_128(C, d) MEGA_MOE_WGMMA_LIST_64(C, d), \
    MEGA_MOE_WGMMA_LIST_16(C, d, 64), MEGA_MOE_WGMMA_LIST_16(C, d, 80), \
    MEGA_MOE_WGMMA_LIST_16(C, d, 96), MEGA_MOE_WGMMA_LIST_16(C, d, 112)
// clang-format on
