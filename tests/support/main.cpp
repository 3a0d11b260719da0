// The test program's main() for Catch2 2; with Catch2 3 it comes from Catch2::Catch2WithMain and this file is left out.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 with sanitizers finds some in its own <regex>
#endif
#define CATCH_CONFIG_MAIN
#include "catch.hpp"
