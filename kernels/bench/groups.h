#pragma once

namespace mega_moe::bench {

// Each prints its lines (report.h) and returns whether all its checks passed.
bool run_peer();    // copies between devices, or within one, against SMs and bytes in flight
bool run_l2();      // what TMA loads out of L2, with and without multicast
bool run_tiles();   // GEMMs of all variants, at four shapes
bool run_sms();     // one GEMM on fewer and fewer SMs
bool run_launch();  // cooperative launches of clusters, grid barriers, launches that wait for one another
bool run_flags();   // round trips of a flag between two SMs and two devices

}  // namespace mega_moe::bench
