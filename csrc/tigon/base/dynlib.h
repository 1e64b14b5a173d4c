// Shared libraries opened at run time, so that one binary loads with and without them.
#pragma once

#include <initializer_list>

namespace tigon {

// First library of the list that is already in the process, else the first that the loader finds; nullptr when none.
void* open_library(std::initializer_list<const char*> sonames);
// Only a library that is already in the process (never loads one).
void* loaded_library(const char* soname);
void* find_symbol(void* library, const char* name);  // nullptr when absent

}  // namespace tigon
