// Device "cuda" without a GPU: a guard and hooks that do nothing, and torch's choice of an attention kernel. Tensors of
// this device are fakes, so nothing here computes. Built and loaded by stand_in.py.
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

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

// torch's order for CUDA: flash, efficient, math, each with what its kernel takes (aten/native/transformers/cuda).
int64_t attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const std::optional<at::Tensor>& mask, double, bool, std::optional<double>, bool) {
  const bool low = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  const bool dense = query.dim() == 4 && query.size(-1) == value.size(-1) && key.sym_size(-2) != 0;
  if (low && dense && !mask.has_value() && query.size(-1) <= 256) return int64_t(at::SDPBackend::flash_attention);
  const int64_t aligned = low ? 8 : 4;
  const bool whole = query.dim() == 4 && query.size(-1) % aligned == 0 && value.size(-1) % aligned == 0;
  return int64_t(whole ? at::SDPBackend::efficient_attention : at::SDPBackend::math);
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
  long versionCuDNN() const override { return 91002; }
  long versionRuntimeCuDNN() const override { return 91002; }
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
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention);
}
