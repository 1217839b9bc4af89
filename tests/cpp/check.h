// A check that ends the test program with the place and the values.

#ifndef JAX_MOE_TESTS_CHECK_H_
#define JAX_MOE_TESTS_CHECK_H_

#include <cstdlib>
#include <iostream>

#define CHECK_THAT(condition, ...)                                   \
  do {                                                               \
    if (!(condition)) {                                              \
      std::cerr << __FILE__ << ":" << __LINE__ << ": " << #condition \
                << " does not hold: " << __VA_ARGS__ << std::endl;   \
      std::_Exit(1);                                                 \
    }                                                                \
  } while (0)

#define CHECK_CONTAINS(text, part) \
  CHECK_THAT((text).find(part) != std::string::npos, "'" << (part) << "' in '" << (text) << "'")

#endif  // JAX_MOE_TESTS_CHECK_H_
