// The groups of checks that main() runs in turn.

#ifndef JAX_MOE_TESTS_TESTS_H_
#define JAX_MOE_TESTS_TESTS_H_

#include <cstdint>

namespace jax_moe {

void TestOperations();                  // results against the oracle, over many shapes
void TestPhases();                      // what one phase wrote the next one sees
void TestCopies();                      // streaming copies at every alignment
void TestWrongInput();                  // a wrong plan is an error, not a crash
void TestStress(int64_t rounds);        // many groups, call sites and runs at once, with delays
void TestTimeoutRaces(int64_t rounds);  // the last device against the watchdog
void TestRunsAhead();                   // a device's n-th coming meets the others' n-th
void TestCompletions();                 // no completion waits behind another
void TestMissingRank();                 // timeout, late devices, reuse
void TestTimeoutChanges();              // set and closed while calls wait
void TestDisagreement();                // other shapes, wrong device, unknown group
void TestNothingStays(int64_t calls);   // no memory kept of past calls

}  // namespace jax_moe

#endif  // JAX_MOE_TESTS_TESTS_H_
