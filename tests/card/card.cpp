// Accelerators in this host's memory, for tests: "card".
//
// Its memory can be read and written by its own kernels alone; whatever else touches it is ended by the kernel of the
// operating system. Kernels are the CPU's, on copies. Everything is done at once, in the order in which it is asked for.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

namespace {
constexpr auto kCard = c10::DeviceType::PrivateUse1;
constexpr size_t kPage = 4096;
constexpr size_t kTotal = size_t(8) << 30;

// What there is of memory, by its address: its pages, and how many kernels have it open.
struct Block {
  size_t size;
  int open;
};
std::mutex lock;
std::map<uintptr_t, Block> blocks;
size_t held = 0, most = 0;

// As many as the process is shown, as of CUDA's; a process computes on the first of them alone.
c10::DeviceIndex cards() {
  const char* shown = getenv("CUDA_VISIBLE_DEVICES");
  if (!shown) shown = getenv("RLHPC_CARDS");
  std::string names = shown ? shown : "0";
  return names.empty() ? 0 : 1 + std::count(names.begin(), names.end(), ',');
}

void guard(const void* pointer, int by) {
  std::lock_guard<std::mutex> own(lock);
  auto found = blocks.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (found == blocks.begin()) return;
  --found;
  auto& block = found->second;
  if (reinterpret_cast<uintptr_t>(pointer) >= found->first + block.size) return;
  block.open += by;
  if ((by > 0 && block.open == 1) || block.open == 0) {
    TORCH_CHECK(!mprotect(reinterpret_cast<void*>(found->first), block.size, block.open ? PROT_READ | PROT_WRITE : PROT_NONE));
  }
}

// Opens memory while a kernel runs.
struct Opened {
  explicit Opened(std::vector<const void*> pointers) : pointers(std::move(pointers)) {
    for (auto* one : this->pointers) guard(one, 1);
  }
  ~Opened() {
    for (auto* one : pointers) guard(one, -1);
  }
  std::vector<const void*> pointers;
};

void give_back(void* pointer) {
  if (!pointer) return;
  std::lock_guard<std::mutex> own(lock);
  auto found = blocks.find(reinterpret_cast<uintptr_t>(pointer));
  munmap(pointer, found->second.size);
  held -= found->second.size;
  blocks.erase(found);
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    void* pointer = nullptr;
    if (n) {
      size_t size = (n + kPage - 1) / kPage * kPage;
      pointer = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK_WITH(OutOfMemoryError, pointer != MAP_FAILED && held + size <= kTotal, "card out of memory");
      std::lock_guard<std::mutex> own(lock);
      blocks[reinterpret_cast<uintptr_t>(pointer)] = {size, 0};
      held += size;
      most = std::max(most, held);
    }
    return {pointer, pointer, &give_back, c10::Device(kCard, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t count) const override {
    Opened both({to, from});
    memcpy(to, from, count);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats found;
    found.allocated_bytes[0].current = held;
    found.allocated_bytes[0].peak = most;
    found.reserved_bytes[0].current = held;
    found.reserved_bytes[0].peak = most;
    return found;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { most = held; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {kTotal - held, kTotal}; }
};
Memory memory;
REGISTER_ALLOCATOR(kCard, &memory);

// Streams have numbers and nothing else: what is asked for has been done.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static inline thread_local c10::StreamId current = 0;
  static inline c10::StreamId last = 0;
  c10::DeviceType type() const override { return kCard; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kCard, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream stream(c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, getDevice(), id); }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(++last); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++last); }
  c10::Stream exchangeStream(c10::Stream next) const override { return stream(std::exchange(current, next.id())); }
  c10::DeviceIndex deviceCount() const noexcept override { return cards(); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return cards() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return cards(); }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(c10::Device(c10::DeviceType::CPU));
  }
  at::Device getDeviceFromPtr(void*) const override { return {kCard, 0}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto next = memory.allocate(size);
    if (size_t both = std::min(size, storage.nbytes())) memory.copy_data(next.get(), storage.data(), both);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(next));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
Hooks hooks;
const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// The same memory, as the CPU's.
at::Tensor seen(const at::Tensor& tensor) {
  if (tensor.device().type() != kCard) return tensor;
  auto storage = at::from_blob(const_cast<void*>(tensor.storage().data()),
                               {int64_t(tensor.storage().nbytes() / tensor.itemsize())}, tensor.options().device(at::kCPU));
  return storage.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  if (to.numel()) {
    Opened both({self.storage().data(), to.storage().data()});
    at::NoGradGuard none;
    seen(to.detach()).copy_(seen(self.detach()));
  }
  return to;
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() == size) return self;  // a view keeps its strides
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t need = (impl->storage_offset() + impl->numel()) * self.itemsize();
  if (need > impl->storage().nbytes()) hooks.resizePrivateUse1Bytes(impl->storage(), need);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  resize_(to, self.sizes(), std::nullopt);
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) { return self.cpu().item(); }
at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  int64_t count = source.nbytes() / self.itemsize();
  return at::cpu::set_(self, source, 0, {count}, {});
}
at::Tensor& set_part(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::cpu::set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}
int64_t plain_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
                        bool, std::optional<double>, bool) {
  return 0;
}
void record_stream(at::Tensor&, at::Stream) {}

void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("view", at::native::view);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("_fused_sdp_choice", plain_attention);
  m.impl("record_stream", record_stream);
}
}  // namespace
