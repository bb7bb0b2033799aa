#include "cpu/check.h"

int main() {
    test_route();
    std::puts("route: passed");
    return 0;
}
