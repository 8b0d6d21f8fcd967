/* NVML, as PyTorch and pynvml ask it. A handle is the number of the GPU plus one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { NOT_SUPPORTED = 3, NOT_FOUND = 6 };

struct memory { /* nvmlMemory_t */
  unsigned long long total, free, used;
};
struct memory_v2 { /* nvmlMemory_v2_t */
  unsigned version;
  unsigned long long total, reserved, free, used;
};
struct utilization { /* nvmlUtilization_t */
  unsigned gpu, memory;
};
struct pci { /* nvmlPciInfo_t */
  char legacy[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char id[32];
};

/* This process's GPU, from the runtime's stub; without it there is none. */
static void *ask(const char *name) { return dlsym(RTLD_DEFAULT, name); }
static int gpus(void) {
  int (*count)(void) = ask("phantom_count");
  return count ? count() : 0;
}
static int number(void *device) { return (int)(uintptr_t)device - 1; }

int nvmlInit_v2(void) { return 0; }
int nvmlInit(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return error == NOT_FOUND ? "Not Found" : "Not Supported"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = gpus();
  return 0;
}
int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  if ((int)index >= gpus()) return NOT_FOUND;
  *device = (void *)(uintptr_t)(index + 1);
  return 0;
}
int nvmlDeviceGetHandleByIndex(unsigned index, void **device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
  unsigned domain, bus;
  if (sscanf(id, "%x:%x:", &domain, &bus) != 2 || bus == 0) return NOT_FOUND;
  return nvmlDeviceGetHandleByIndex_v2(bus - 1, device);
}
int nvmlDeviceGetIndex(void *device, unsigned *index) {
  *index = number(device);
  return 0;
}
int nvmlDeviceGetName(void *device, char *text, unsigned bytes) {
  const char *(*name)(void) = ask("phantom_name");
  snprintf(text, bytes, "%s", name());
  return 0;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned bytes) {
  snprintf(text, bytes, "GPU-00000000-0000-0000-0000-%012d", number(device));
  return 0;
}
int nvmlDeviceGetPciInfo_v3(void *device, struct pci *info) {
  memset(info, 0, sizeof *info);
  info->bus = number(device) + 1;
  snprintf(info->id, sizeof info->id, "00000000:%02X:00.0", info->bus);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, struct memory *info) {
  void (*memory)(int, unsigned long long *, unsigned long long *) = ask("phantom_memory");
  memory(number(device), &info->total, &info->used);
  info->free = info->total - info->used;
  return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *info) {
  void (*memory)(int, unsigned long long *, unsigned long long *) = ask("phantom_memory");
  memory(number(device), &info->total, &info->used);
  info->reserved = 0;
  info->free = info->total - info->used;
  return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, struct utilization *rates) {
  rates->gpu = rates->memory = 0;
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
  void (*capability)(int *, int *) = ask("phantom_capability");
  capability(major, minor);
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *processes) {
  *count = 0;
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
  *count = 0;
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = 13000;
  return 0;
}
int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }
int nvmlSystemGetDriverVersion(char *text, unsigned bytes) {
  snprintf(text, bytes, "phantom");
  return 0;
}
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return 0; }
int nvmlDeviceGetGpuFabricInfo(void *device, void *info) { return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return NOT_SUPPORTED; }
