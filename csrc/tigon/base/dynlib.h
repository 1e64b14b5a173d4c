// Opens shared libraries at run time, so that one binary loads whether or not they are installed.
#pragma once

#include <initializer_list>

namespace tigon {

// Returns the first library of the list that the process has already loaded, else the first that the loader
// finds; nullptr if there is none.
void* open_library(std::initializer_list<const char*> sonames);
// Returns a library that the process has already loaded, and never loads one.
void* loaded_library(const char* soname);
// Returns nullptr if the library has no such symbol.
void* find_symbol(void* library, const char* name);

}  // namespace tigon
