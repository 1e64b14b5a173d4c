// Symbols that a C++ program links against; everything else is hidden.
#pragma once
#define TIGON_API __attribute__((visibility("default")))
