#include <cstring>

#include "cpu/check.h"

// mega_moe_cpu_tests SUITE runs one suite; the exit status says whether it held.
int main(int count, char** arguments) {
    const struct {
        const char* name;
        void (*run)();
    } suites[] = {{"backward_progress", test_backward_progress},
                  {"forward_progress", test_forward_progress},
                  {"forward_tiles", test_forward_tiles},
                  {"gradient_operands", test_gradient_operands},
                  {"gradient_tiles", test_gradient_tiles},
                  {"group_scale", test_group_scale},
                  {"layouts", test_layouts},
                  {"saved_gate_up", test_saved_gate_up},
                  {"select", test_select},
                  {"weight_block", test_weight_block}};
    CHECK(count == 2, "got %d arguments, want the name of a suite", count - 1);
    for (const auto& suite : suites) {
        if (std::strcmp(suite.name, arguments[1]) != 0) continue;
        suite.run();
        std::printf("%s: passed\n", suite.name);
        return 0;
    }
    std::fprintf(stderr, "suite: got %s, want one of", arguments[1]);
    for (const auto& suite : suites)
        std::fprintf(stderr, " %s", suite.name);
    std::fputc('\n', stderr);
    return 2;
}
