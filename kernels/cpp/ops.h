// How kernels are registered for ops.
#pragma once

#include "boxed.h"

namespace amp {

// Ops and kernels of one namespace, for the dispatch key `key`. They go with this object, unless they are kept.
class Library {
 public:
  Library(const char* name, const char* key) {
    succeeds(aoti_torch_library_init_fragment(name, __FILE__, __LINE__, &definitions_));
    succeeds(aoti_torch_library_init_impl(name, key, __FILE__, __LINE__, &kernels_));
  }
  ~Library() {
    if (kept_) return;
    aoti_torch_delete_library_object(kernels_);
    aoti_torch_delete_library_object(definitions_);
  }
  void keep() { kept_ = true; }
  void impl(const char* op, void (*kernel)(StableIValue*, uint64_t, uint64_t)) {
    succeeds(torch_library_impl(kernels_, op, kernel, TORCH_ABI));
  }
  void def(const char* schema, void (*kernel)(StableIValue*, uint64_t, uint64_t)) {
    succeeds(aoti_torch_library_def(definitions_, schema));
    std::vector<char> name;
    while (*schema != '(') name.push_back(*schema++);
    name.push_back(0);
    impl(name.data(), kernel);
  }

 private:
  TorchLibraryHandle definitions_ = nullptr, kernels_ = nullptr;
  bool kept_ = false;
};

void register_lists(Library& library);  // the kernels for lists of gradients

}  // namespace amp
