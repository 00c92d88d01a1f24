/* A driver library (libnvidia-ml.so.1) for simulated devices: the functions of NVML that reading devices takes, answered
 * from the directories that ledger.py writes. Status codes, structures and the two-call protocol of process lists are
 * NVML's. Faults: the file <root>/fault holds lines "<function> <code>"; the named function then returns that code, and
 * code -1 never returns. Not thread-safe: the reader uses one thread. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };
enum { MAX_DEVICES = 64, MAX_NAME = 96 };

typedef struct { char uuid[MAX_NAME]; char parent[MAX_NAME]; unsigned long long total; } Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; } Process;

static Device devices[MAX_DEVICES];
static int ready;

static const char *root(void) { return getenv("RLFLEET_SIM_DEVICES"); }

static int fault(const char *function) {
    char path[4096], name[64];
    int code, found = SUCCESS;
    FILE *file;
    if (!root()) return SUCCESS;
    snprintf(path, sizeof path, "%s/fault", root());
    if (!(file = fopen(path, "r"))) return SUCCESS;
    while (fscanf(file, "%63s %d", name, &code) == 2)
        if (!strcmp(name, function)) found = code;
    fclose(file);
    while (found < 0) pause();
    return found;
}

#define ENTER(function) \
    do { int bad = fault(function); if (bad) return bad; if (!ready) return UNINITIALIZED; } while (0)

/* Whether a comma-separated list holds a word. */
static int lists(const char *list, const char *word) {
    size_t size = strlen(word);
    for (const char *at = list; *word && at && *at; at = strchr(at, ','), at = at ? at + 1 : NULL)
        if (!strncmp(at, word, size) && (at[size] == ',' || !at[size])) return 1;
    return 0;
}

static int describe(const char *uuid, Device *device) {
    char path[4096], key[16], value[MAX_NAME];
    FILE *file;
    snprintf(path, sizeof path, "%s/%s/device", root(), uuid);
    if (!(file = fopen(path, "r"))) return 0;
    memset(device, 0, sizeof *device);
    snprintf(device->uuid, sizeof device->uuid, "%s", uuid);
    while (fscanf(file, "%15s %95s", key, value) == 2) {
        if (!strcmp(key, "total")) device->total = strtoull(value, NULL, 10);
        if (!strcmp(key, "parent")) snprintf(device->parent, sizeof device->parent, "%s", value);
    }
    fclose(file);
    return 1;
}

static int by_uuid(const void *a, const void *b) { return strcmp(((const Device *)a)->uuid, ((const Device *)b)->uuid); }

/* What the container may see: the devices named to it, slices of named GPUs, and GPUs of which a slice is named. */
static int look(Device *found) {
    const char *wanted = getenv("NVIDIA_VISIBLE_DEVICES");
    Device all[MAX_DEVICES];
    int count = 0, kept = 0;
    struct dirent *entry;
    DIR *folder;
    if (!root() || !wanted || !(folder = opendir(root()))) return 0;
    while ((entry = readdir(folder)) && count < MAX_DEVICES)
        if (entry->d_name[0] != '.' && describe(entry->d_name, &all[count])) count++;
    closedir(folder);
    for (int i = 0; i < count; i++) {
        int shown = !strcmp(wanted, "all") || lists(wanted, all[i].uuid) || lists(wanted, all[i].parent);
        for (int j = 0; j < count && !shown; j++)
            shown = !strcmp(all[j].parent, all[i].uuid) && lists(wanted, all[j].uuid);
        if (shown) found[kept++] = all[i];
    }
    qsort(found, kept, sizeof *found, by_uuid);
    return kept;
}

/* Handles stay valid: a device keeps its place in the table once it has one. */
static Device *handle(const Device *device) {
    for (int i = 0; i < MAX_DEVICES; i++) {
        if (!devices[i].uuid[0]) devices[i] = *device;
        if (!strcmp(devices[i].uuid, device->uuid)) return &devices[i];
    }
    return NULL;
}

/* One process's file: its bytes and name; 0 when it has ended (nobody holds the lock). */
static int holder(const Device *device, const char *pid, unsigned long long *used, char *name, size_t size) {
    char path[4096], text[128] = "";
    int file, alive;
    snprintf(path, sizeof path, "%s/%s/users/%s", root(), device->uuid, pid);
    if ((file = open(path, O_RDONLY | O_CLOEXEC)) < 0) return 0;
    alive = flock(file, LOCK_SH | LOCK_NB) != 0;
    ssize_t length = pread(file, text, sizeof text - 1, 0);
    close(file);
    if (!alive || length < 21) return 0;
    text[strcspn(text, "\n")] = 0;
    *used = strtoull(text, NULL, 10);
    if (name) snprintf(name, size, "%s", text + 21);
    return 1;
}

static int holders(const Device *device, Process *list, int room, unsigned long long *sum) {
    char path[4096];
    struct dirent *entry;
    DIR *folder;
    int count = 0;
    *sum = 0;
    snprintf(path, sizeof path, "%s/%s/users", root(), device->uuid);
    if (!(folder = opendir(path))) return 0;
    while ((entry = readdir(folder))) {
        unsigned long long used;
        if (entry->d_name[0] == '.' || !holder(device, entry->d_name, &used, NULL, 0)) continue;
        *sum += used;
        if (list && count < room) list[count] = (Process){(unsigned)atoi(entry->d_name), used, ~0u, ~0u};
        count++;
    }
    closedir(folder);
    return count;
}

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    int bad = fault("nvmlInit");
    if (bad) return bad;
    if (!root()) return DRIVER_NOT_LOADED;
    ready++;
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (!ready) return UNINITIALIZED;
    ready--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) { return code == SUCCESS ? "Success" : "simulated error"; }

int nvmlDeviceGetCount_v2(unsigned int *count) {
    ENTER("nvmlDeviceGetCount");
    Device found[MAX_DEVICES];
    int every = look(found);
    *count = 0;
    for (int i = 0; i < every; i++) *count += !found[i].parent[0];
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device **device) {
    ENTER("nvmlDeviceGetHandleByIndex");
    Device found[MAX_DEVICES];
    int every = look(found);
    for (int i = 0; i < every; i++)
        if (!found[i].parent[0] && index-- == 0) return (*device = handle(&found[i])) ? SUCCESS : NOT_FOUND;
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned int length) {
    ENTER("nvmlDeviceGetUUID");
    if (strlen(device->uuid) + 1 > length) return INSUFFICIENT_SIZE;
    strcpy(uuid, device->uuid);
    return SUCCESS;
}

static int slices(const Device *device, Device *parts) {
    Device found[MAX_DEVICES];
    int every = look(found), count = 0;
    for (int i = 0; i < every; i++)
        if (!strcmp(found[i].parent, device->uuid)) parts[count++] = found[i];
    return count;
}

int nvmlDeviceGetMigMode(Device *device, unsigned int *current, unsigned int *pending) {
    ENTER("nvmlDeviceGetMigMode");
    Device parts[MAX_DEVICES];
    if (device->parent[0]) return INVALID_ARGUMENT;
    int cut = slices(device, parts);
    if (!cut) return NOT_SUPPORTED;
    *current = *pending = 1;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned int *count) {
    ENTER("nvmlDeviceGetMaxMigDeviceCount");
    (void)device;
    *count = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned int index, Device **part) {
    ENTER("nvmlDeviceGetMigDeviceHandleByIndex");
    Device parts[MAX_DEVICES];
    /* As on real GPUs the places of slices have gaps. */
    if (index % 2 || (int)(index / 2) >= slices(device, parts)) return NOT_FOUND;
    return (*part = handle(&parts[index / 2])) ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    ENTER("nvmlDeviceGetMemoryInfo");
    Device fresh;
    if (!describe(device->uuid, &fresh)) return GPU_IS_LOST;
    holders(device, NULL, 0, &memory->used);
    memory->total = fresh.total;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned int *count, Process *list) {
    ENTER("nvmlDeviceGetComputeRunningProcesses");
    unsigned long long sum;
    unsigned int room = list ? *count : 0;
    *count = holders(device, list, room, &sum);
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *device, unsigned int *count, Process *list) {
    ENTER("nvmlDeviceGetGraphicsRunningProcesses");
    (void)device, (void)list;
    *count = 0;
    return SUCCESS;
}

int nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length) {
    ENTER("nvmlSystemGetProcessName");
    Device found[MAX_DEVICES];
    char text[16];
    unsigned long long used;
    int every = look(found);
    snprintf(text, sizeof text, "%u", pid);
    for (int i = 0; i < every; i++)
        if (holder(&found[i], text, &used, name, length)) return SUCCESS;
    return NOT_FOUND;
}
