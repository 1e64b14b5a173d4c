// TIGON_API marks the symbols that a C++ program links against. All others are hidden.
#pragma once
#define TIGON_API __attribute__((visibility("default")))
