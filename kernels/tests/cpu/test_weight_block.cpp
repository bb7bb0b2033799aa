#include <cstdint>
#include <cstring>

#include "cpu/check.h"
#include "device/common/transpose_bytes.cuh"
#include "layout/weight_block.h"

// What the kernel that quantizes weights does to a block between its loads and its stores.
namespace {

using namespace mega_moe::layout;

std::uint8_t code(int row, int column) {
    return static_cast<std::uint8_t>(row * 57 + column * 131 + row / 16);
}

// Each thread puts its patch, transposed, into shared memory and then reads the pieces that it stores.
void test_block_is_transposed() {
    static std::uint8_t shared[kTransposedBytes];
    static bool written[kTransposedBytes];
    for (int thread = 0; thread < kPatchThreads; ++thread) {
        const int patch_row = thread / kPatches;
        const int patch_column = thread % kPatches;
        std::uint32_t codes[kPatch][2] = {};
        for (int i = 0; i < kPatch; ++i)
            for (int j = 0; j < kPatch; ++j)
                codes[i][j / 4] |= std::uint32_t{code(patch_row * kPatch + i, patch_column * kPatch + j)}
                                   << j % 4 * 8;
        mega_moe::device::transpose_8x8(codes);
        for (int i = 0; i < kPatch; ++i) {
            const int at = transposed_piece(patch_column * kPatch + i, patch_row);
            CHECK(at % kPatch == 0 && at >= 0 && at < kTransposedBytes, "piece at %d", at);
            CHECK(!written[at], "piece at %d is written twice", at);
            written[at] = true;
            std::memcpy(shared + at, codes[i], kPatch);
        }
    }
    for (int row = 0; row < kWeightBlock; ++row) {
        for (int pair = 0; pair < kPatches / 2; ++pair) {
            const bool swapped = pieces_are_swapped(row);
            const int at = transposed_piece(row, 2 * pair + (swapped ? 1 : 0));
            CHECK(at % 16 == 0, "pair %d of row %d at %d", pair, row, at);
            for (int i = 0; i < 16; ++i) {
                const int from = at + (swapped ? (i + 8) % 16 : i);
                CHECK(shared[from] == code(pair * 16 + i, row), "row %d, pair %d, byte %d", row, pair, i);
            }
        }
    }
}

// 16 lanes write 8 bytes each at a time: all 32 banks, each once.
void test_writes_meet_no_bank_twice() {
    for (int patch_row = 0; patch_row < kPatches; ++patch_row) {
        for (int i = 0; i < kPatch; ++i) {
            std::uint32_t banks = 0;
            for (int patch_column = 0; patch_column < kPatches; ++patch_column)
                banks |= 3u << transposed_piece(patch_column * kPatch + i, patch_row) / 4 % 32;
            CHECK(banks == 0xFFFFFFFFu, "patch row %d, row %d: banks %08x", patch_row, i, banks);
        }
    }
}

}  // namespace

void test_weight_block() {
    test_block_is_transposed();
    test_writes_meet_no_bank_twice();
}
