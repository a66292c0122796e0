// Stand-in for libcuda.so.1 where kernels are compiled without a driver. No context exists, and how many devices there
// are is ours to say: torch's autograd engine starts a thread for each device and asks these functions of libc10_cuda.
// Preloaded, it also hides a real driver, so that nothing can reach a card that happens to be there.
namespace {
signed char devices = 0, chosen = 0;
}
extern "C" void dflash_stub_set(int count, int index) {
  devices = static_cast<signed char>(count);
  chosen = static_cast<signed char>(index);
}
extern "C" int cuDevicePrimaryCtxGetState(int, unsigned *flags, int *active) {
  *flags = 0;
  *active = 0;
  return 0;
}
namespace c10 {
namespace cuda {
bool hasPrimaryContext(signed char) { return false; }
signed char device_count() noexcept { return devices; }
signed char device_count_ensure_non_zero() { return devices; }
signed char current_device() { return chosen; }
}  // namespace cuda
}  // namespace c10
