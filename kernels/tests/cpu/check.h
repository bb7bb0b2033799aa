#pragma once
#include <cstdio>
#include <cstdlib>

// Ends the program with a message unless `condition` holds. Unlike assert, it stays in a release build.
#define CHECK(condition, ...)                                                    \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            std::fprintf(stderr, __VA_ARGS__);                                   \
            std::fputc('\n', stderr);                                            \
            std::exit(1);                                                        \
        }                                                                        \
    } while (false)

void test_backward_progress();
void test_forward_progress();
void test_forward_tiles();
void test_gradient_operands();
void test_gradient_tiles();
void test_group_scale();
void test_layouts();
void test_saved_gate_up();
void test_route();
void test_select();
void test_weight_block();
