// Catch2, whichever version is installed: 3 brings <catch2/catch_all.hpp>, 2.13 only <catch2/catch.hpp>.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
