// The functions of torch that the kernels call: C functions that torch keeps compatible from release to release (its
// stable ABI, as of torch 2.13), so that one library serves torch 2.13 and later. They are declared here, and torch's
// headers are not included: they would take longer to compile than the kernels, and would be needed to build a wheel.
// A test compiles these declarations together with torch's own.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
struct StableListOpaque;
using StableListHandle = StableListOpaque*;
class TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
using StableIValue = uint64_t;   // a value on the stack of an op: a number, a handle, or a pointer to another one
using AOTITorchError = int32_t;  // 0: success

const char* torch_exception_get_what_without_backtrace();
bool aoti_torch_grad_mode_is_enabled();
void aoti_torch_grad_mode_set_enabled(bool enabled);

int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_layout_strided();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_bfloat16();

AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* result);
AOTITorchError aoti_torch_new_uninitialized_tensor(AtenTensorHandle* result);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_is_defined(AtenTensorHandle tensor, bool* result);
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle tensor, bool* result);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* result);
AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* result);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** result);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** result);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* result);
AOTITorchError aoti_torch_get_layout(AtenTensorHandle tensor, int32_t* result);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* result);
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** result);
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** result);
AOTITorchError aoti_torch_item_float32(AtenTensorHandle tensor, float* result);

AOTITorchError aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, AtenTensorHandle* result);
AOTITorchError aoti_torch_create_tensor_from_blob(void* data, int64_t dim, const int64_t* sizes, const int64_t* strides,
                                                  int64_t offset, int32_t dtype, int32_t device_type, int32_t device_index,
                                                  AtenTensorHandle* result);
AOTITorchError aoti_torch__reinterpret_tensor(AtenTensorHandle tensor, int64_t dim, const int64_t* sizes,
                                              const int64_t* strides, int64_t offset, AtenTensorHandle* result);
AOTITorchError aoti_torch_copy_(AtenTensorHandle to, AtenTensorHandle from, int32_t non_blocking);
AOTITorchError aoti_torch_cpu_fill__Scalar(AtenTensorHandle tensor, double value);
AOTITorchError aoti_torch_cpu_baddbmm_out(AtenTensorHandle out, AtenTensorHandle plus, AtenTensorHandle a,
                                          AtenTensorHandle b, double beta, double alpha);

AOTITorchError aoti_torch_cpu_convolution(
    AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle* bias, const int64_t* stride, int64_t stride_length,
    const int64_t* padding, int64_t padding_length, const int64_t* dilation, int64_t dilation_length, int32_t transposed,
    const int64_t* output_padding, int64_t output_padding_length, int64_t groups, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_convolution_backward(
    AtenTensorHandle gradient, AtenTensorHandle input, AtenTensorHandle weight, const int64_t** bias_sizes,
    int64_t bias_sizes_length, const int64_t* stride, int64_t stride_length, const int64_t* padding, int64_t padding_length,
    const int64_t* dilation, int64_t dilation_length, int32_t transposed, const int64_t* output_padding,
    int64_t output_padding_length, int64_t groups, const int32_t* output_mask, int64_t output_mask_length,
    AtenTensorHandle* input_gradient, AtenTensorHandle* weight_gradient, AtenTensorHandle* bias_gradient);

AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*run)(int64_t, int64_t, void*), void* with);
AOTITorchError torch_get_num_threads(uint32_t* result);

AOTITorchError torch_new_list_reserve_size(size_t size, StableListHandle* result);
AOTITorchError torch_list_size(StableListHandle list, size_t* result);
AOTITorchError torch_list_get_item(StableListHandle list, size_t index, StableIValue* result);
AOTITorchError torch_list_push_back(StableListHandle list, StableIValue value);
AOTITorchError torch_delete_list(StableListHandle list);
AOTITorchError torch_delete_stable_ivalue(StableIValue* value);

AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* op, void (*kernel)(StableIValue*, uint64_t, uint64_t),
                                  uint64_t version);
AOTITorchError aoti_torch_library_init_fragment(const char* name, const char* file, uint32_t line, TorchLibraryHandle* result);
AOTITorchError aoti_torch_library_init_impl(const char* name, const char* key, const char* file, uint32_t line,
                                            TorchLibraryHandle* result);
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle library);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle library, const char* schema);

}  // extern "C"

namespace amp {

constexpr uint64_t TORCH_ABI = (uint64_t(2) << 56) | (uint64_t(13) << 48);  // the release whose meanings the calls have

}  // namespace amp
