// Drives the core of the CPU custom calls; ends with 0 when all holds.

#include <cstdlib>
#include <iostream>

#include "tests.h"

int main(int argc, char** argv) {
  const int64_t rounds = argc > 1 ? std::atoll(argv[1]) : 10;
  jax_moe::TestOperations();
  jax_moe::TestPhases();
  jax_moe::TestCopies();
  jax_moe::TestWrongInput();
  jax_moe::TestCompletions();
  jax_moe::TestRunsAhead();
  jax_moe::TestMissingRank();
  jax_moe::TestTimeoutChanges();
  jax_moe::TestDisagreement();
  jax_moe::TestTimeoutRaces(rounds);
  jax_moe::TestStress(rounds);
  jax_moe::TestNothingStays(200 * rounds);
  std::cout << "ok" << std::endl;
  return 0;
}
