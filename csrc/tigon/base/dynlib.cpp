#include "tigon/base/dynlib.h"

#include <dlfcn.h>

namespace tigon {

void* loaded_library(const char* soname) { return dlopen(soname, RTLD_NOW | RTLD_NOLOAD); }

void* open_library(std::initializer_list<const char*> sonames) {
  for (const char* name : sonames)
    if (void* lib = loaded_library(name)) return lib;
  for (const char* name : sonames)
    if (void* lib = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return lib;
  return nullptr;
}

void* find_symbol(void* library, const char* name) { return library ? dlsym(library, name) : nullptr; }

}  // namespace tigon
