// Device "cuda" without a GPU: a guard and hooks that do nothing, and the choice of an attention kernel. Tensors of
// this device are fakes, so nothing here computes. Built and loaded by stand_in.py.
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

extern "C" {
int amp_capability = 90; // of the GPU that is stood in for: 90 is 9.0
}

namespace {
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static c10::Device device() { return c10::Device(c10::DeviceType::CUDA, 0); }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device()); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = nullptr;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
};

using Params = sdp::sdp_params;

bool is_low(const Params& p) { return p.query.scalar_type() == at::kHalf || p.query.scalar_type() == at::kBFloat16; }
int64_t width(const at::Tensor& t) { return t.size(-1); }
bool same_dtype(const Params& p) {
  return p.query.scalar_type() == p.key.scalar_type() && p.query.scalar_type() == p.value.scalar_type();
}

// What a CPU build of torch has of CUDA's rules: the checks that are in its headers. What only a CUDA build has is
// written down by hand below, and compared with the answers of one (attention_chosen.json).
bool can_flash(const Params& p) {
  if (!sdp::check_runtime_disabled_flash(p, false) || !sdp::check_tensor_shapes(p, false) ||
      !sdp::check_for_attn_mask(p, false) || !sdp::check_batch_size_and_num_heads_dense<true>(p, false) ||
      !sdp::check_nonzero_sequence_lengths_dense(p, false) ||
      !sdp::check_last_dim_stride_equals_1_dense<true>(p, false))
    return false;
  const bool one_width = width(p.query) == width(p.key) && width(p.query) == width(p.value);
  const bool square = !p.is_causal || p.query.sym_size(-2) == p.key.sym_size(-2); // else causal means another corner
  return is_low(p) && same_dtype(p) && one_width && width(p.query) <= 256 && square;
}

bool can_efficient(const Params& p) {
  if (!sdp::check_runtime_disabled_mem_efficient(p, false) || !sdp::check_tensor_shapes(p, false) ||
      !sdp::check_batch_size_and_num_heads_dense<false>(p, false) ||
      !sdp::check_nonzero_sequence_lengths_dense(p, false) ||
      !sdp::check_last_dim_stride_equals_1_dense<false>(p, false))
    return false;
  const int64_t aligned = is_low(p) ? 8 : 4; // 16 bytes
  const bool whole = width(p.query) == width(p.key) && width(p.query) % aligned == 0 && width(p.value) % aligned == 0;
  return (is_low(p) || p.query.scalar_type() == at::kFloat) && same_dtype(p) && whole && width(p.query) > 0;
}

bool can_cudnn(const Params& p) {
  if (!at::globalContext().userEnabledCuDNNSDP() || !sdp::check_tensor_shapes(p, false) ||
      !sdp::check_batch_size_and_num_heads_dense<true, false>(p, false) ||
      !sdp::check_nonzero_sequence_lengths_dense(p, false) ||
      !sdp::check_last_dim_stride_equals_1_dense<true>(p, false))
    return false;
  const bool whole = width(p.query) % 8 == 0 && width(p.value) % 8 == 0;
  const bool learned = p.attn_mask.has_value() && p.attn_mask->requires_grad();
  return is_low(p) && same_dtype(p) && whole && width(p.query) <= 256 && width(p.value) <= 256 && !learned &&
      sdp::check_for_dropout(p, false) && p.key.sym_size(-2) != 1;
}

int64_t attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double>,
                  bool grouped) {
  const Params params{query, key, value, mask, dropout, causal, grouped};
  if (amp_capability >= 90 && can_cudnn(params)) return int64_t(at::SDPBackend::cudnn_attention);
  if (can_flash(params)) return int64_t(at::SDPBackend::flash_attention);
  if (can_efficient(params)) return int64_t(at::SDPBackend::efficient_attention);
  return int64_t(at::SDPBackend::math);
}
} // namespace

namespace at {
struct NoDevice : CUDAHooksInterface {
  explicit NoDevice(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 92000; } // 9.20, which PyPI's torch 2.13 comes with
  long versionRuntimeCuDNN() const override { return 92000; }
  long versionCuDNNFrontend() const override { return 11200; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};
// A CUDA build of torch registers hooks too, with the default priority.
static RegistererCUDAHooksRegistry hooks("CUDAHooks", c10::REGISTRY_PREFERRED, CUDAHooksRegistry(),
                                         RegistererCUDAHooksRegistry::DefaultCreator<NoDevice>);
} // namespace at

// Called once torch is there: what a CUDA build has registered by then is replaced.
extern "C" void amp_no_device() {
  static c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA, new Guard());
}

// Called in a CPU build only: a CUDA build chooses by itself, and asks for the GPU below.
extern "C" void amp_choose_attention() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention); }

// These take the place of a CUDA build's, because this library is loaded before it.
namespace c10::cuda {
signed char device_count() noexcept { return 1; }
} // namespace c10::cuda
namespace at::cuda {
void* getCurrentDeviceProperties() { // a cudaDeviceProp, of which only the compute capability is asked for
  static int properties[1024] = {};
  properties[90] = amp_capability / 10; // major and minor follow 360 bytes of other fields, in CUDA 12 and 13
  properties[91] = amp_capability % 10;
  return properties;
}
} // namespace at::cuda
